"""`syncd init`: writes the files of a new job."""

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path

import click

from syncd.console import UncheckedPath
from syncd.errors import DOCS, UsageError, storage_errors
from syncd.protocol.documents import parse_json
from syncd.stall.verbs import MountVerb, pending_calls

ENGINES = ("vllm", "sglang", "transformers")
RECIPES = ("sft", "grpo", "lora")
_SOURCE = Path(__file__).parents[1] / "recipes"
_ENGINE, _JOB, _IMAGE = "@ENGINE@", "job", "syncd.def"


def job_files(recipe: str, engine: str | None, model: str) -> dict[str, str]:
    """Return the files of a recipe by name; `engine` is None for sft, which has no explorers; `model` is absolute."""
    text = _read(f"{recipe}.toml").replace("@DOCS@", DOCS)
    text = text.replace("@MODEL@", json.dumps(model, ensure_ascii=False))
    if engine is None:
        copied = ["examples.jsonl", "trainer.sbatch", _IMAGE]
    else:
        text = text.replace(_ENGINE, _engine_table(recipe, engine))
        array = "explorers.sbatch" if engine == "transformers" else f"explorers-{engine}.sbatch"
        copied = ["tasks.jsonl", "reward.py", "trainer.sbatch", array, "together.sbatch", _IMAGE]
    return {"job.toml": text, **{name: _read(name) for name in copied}}


def _engine_table(recipe: str, engine: str) -> str:
    own = f"engine-{engine}-{recipe}.toml"
    return _read(own if (_SOURCE / own).is_file() else f"engine-{engine}.toml").rstrip("\n")


def _read(name: str) -> str:
    return (_SOURCE / name).read_text(encoding="utf-8")


def _checked_engine(recipe: str, engine: str | None) -> str | None:
    if recipe != "sft":
        return engine or "vllm"
    if engine is not None:
        hint = "syncd follow JOB --hook vllm=URL keeps a server at the newest version"
        raise UsageError(f"--engine {engine}: sft has no explorers", hint=hint)
    return None


def _checked_model(model: str) -> str:
    path = os.path.abspath(os.path.expanduser(model))
    if "$" in path or not path.isprintable():
        raise UsageError("a job's file cannot name this path", path=path, hint="use a symbolic link")
    with pending_calls()("stat", path):
        is_model = os.path.isfile(f"{path}/config.json")
    if not is_model:
        hint = f"hf download ORG/MODEL --local-dir {shlex.quote(path)}"
        raise UsageError("not a model directory: it has no config.json", path=path, hint=hint)
    return path


def _has_tied_head(model: str) -> bool:
    """Return whether config.json says that the head is the embedding, for the whole model or for its text part."""
    with open(f"{model}/config.json", encoding="utf-8") as file, suppress(ValueError):
        config = parse_json(file.read())
        parts = [config, config.get("text_config")] if isinstance(config, dict) else []
        return any(part.get("tie_word_embeddings") is True for part in parts if isinstance(part, dict))
    return False


def _warn_of_tied_head() -> None:
    click.echo(
        "warning: the head of this model is tied to its embedding. vLLM 0.32.0 on CPUs kept the old head when it"
        " reloaded weights; on GPUs nobody has tried it here. The first version shows it: its state is then `wrong`,"
        " and the engine gets no work.\n"
        'hint: reload = "restart" in [explorer.engine], or --engine sglang: '
        f"{DOCS}/follow-vllm.md#known-limits",
        err=True,
    )


def _write(directory: str, files: dict[str, str]) -> None:
    """Write files and an empty job into a directory; write nothing if one of them is there."""
    with storage_errors(directory), pending_calls()("write", directory):
        os.makedirs(directory, exist_ok=True)
        if there := [name for name in (*files, _JOB) if os.path.lexists(f"{directory}/{name}")]:
            message = f"nothing was written, because these files exist: {', '.join(there)}"
            raise UsageError(message, path=directory, hint=f"ls -l {shlex.quote(directory)}")
        os.mkdir(f"{directory}/{_JOB}")  # so that `syncd wait` and `status` know it before anything runs
        for name, text in files.items():
            with open(f"{directory}/{name}", "x", encoding="utf-8") as file:
                file.write(text)


def next_commands(directory: str, engine: str | None) -> list[str]:
    """Return what to run next, on a cluster and on one machine."""
    start = [f"cd {shlex.quote(directory)}", "syncd doctor .", "trainer train job.toml --dry-run"]
    run, alone = "sbatch trainer.sbatch job.toml job", "trainer train job.toml"
    if engine is not None:
        run, alone = "sbatch together.sbatch job.toml job", f"{alone} & explorer run job.toml --name e0"
    return [*start, f"{run}    # on one machine: {alone}", "syncd status job"]


@click.command(cls=MountVerb)
@click.argument("directory", metavar="DIR", type=UncheckedPath(file_okay=False))
@click.option(
    "--recipe",
    type=click.Choice(RECIPES),
    default="grpo",
    help="What to train: sft, grpo, or lora (GRPO with an adapter).",
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    show_default="vllm",
    help="The inference engine; not with sft.",
)
@click.option(
    "--model",
    metavar="DIR",
    required=True,
    type=UncheckedPath(file_okay=False),
    help="Directory of the model to start from.",
)
def init(directory: str, recipe: str, engine: str | None, model: str) -> None:
    r"""Write the files of a new job into DIR, and print what to run next.

    They are a commented job file, sbatch files for Slurm, the definition of an Apptainer image, tasks, a reward
    function and an empty job directory. The tasks are sums: replace them by yours. Nothing is overwritten.

    \b
    Exit codes:
      2   one of the files exists: none was written; or --model is no model directory

    \b
    Examples:
      syncd init /ckpt/first --model /models/Qwen3-8B
      syncd init /ckpt/tuned --model /models/Qwen3-8B --recipe sft
      syncd init /ckpt/small --model /models/Qwen3-8B --recipe lora --engine sglang
    """
    chosen = _checked_engine(recipe, engine)
    path = _checked_model(model)
    files = job_files(recipe, chosen, path)
    _write(os.path.abspath(directory), files)
    for name in files:
        click.echo(os.path.join(directory, name))
    if chosen == "vllm" and recipe != "lora" and _has_tied_head(path):
        _warn_of_tied_head()
    click.echo("\n".join(["next:", *(f"  {command}" for command in next_commands(directory, chosen))]))
