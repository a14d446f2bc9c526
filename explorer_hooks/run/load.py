"""The job's file, as an explorer reads it: one error reports all problems."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from explorer_hooks.run.agent_checks import agent_problems, gateway_problems
from explorer_hooks.run.extensions import lacking_problems
from explorer_hooks.run.stages import stage_layers
from explorer_hooks.run.task_checks import reward_problems, task_problems
from syncd.errors import ConfigError
from syncd.experience.table import MAX_ROWS
from syncd.jobfile.evaluation import set_problems
from syncd.jobfile.explorer_sections import AgentSection, InferenceSection, TeacherSection
from syncd.jobfile.loader import Loader, read_toml, values_at
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.protocol.layout import is_identity

_SERVERS = {
    "vllm": "env VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host {host} --port {port}",
    "sglang": "python -m sglang.launch_server --model-path {model} --host {host} --port {port}",
}
"""Commands that start a server, by kind of engine; no shell runs them."""


def load_file(
    path: str, overrides: Sequence[str] = (), stage: str | None = None, *, trust: bool = False
) -> JobFile:
    """Return what a file says to explorers, with the command line's `--section.key value` on top.

    Args:
        stage: The one of its [[stages]] to explore, in its own directory; its model is known once it begins.
        trust: Whether the code that it names may run, whoever could have written it.
    """
    layers = [*stage_layers(read_toml(path).layer(), stage), LOADER.command_layer(overrides)]
    file = LOADER.load(layers, path, trust=trust)
    return file.in_stage(stage) if stage is not None else file


def load_served_file(path: str, overrides: Sequence[str] = (), *, trust: bool = False) -> JobFile:
    return SERVE_LOADER.load(
        [read_toml(path).layer(), SERVE_LOADER.command_layer(overrides)], path, trust=trust
    )


def load_bench_file(
    job: str, config: str | None, overrides: Sequence[str] = (), *, trust: bool = False
) -> JobFile:
    """Return what a file says to `explorer bench`, with the command line's `--section.key value` on top.

    Args:
        config: The file; None for the configuration that the trainer keeps in the job directory.
    """
    path = config or f"{job}/config.toml"
    if config is None and not os.path.exists(path):
        hint = f"explorer bench {job} --config grpo.toml"
        raise ConfigError("no trainer has kept its configuration there", path=path, hint=hint)
    kept = replace(read_toml(path), is_kept=config is None)
    source = path if config is not None else str(next(iter(values_at(kept.table, "job.source")), path))
    layers = [kept.layer(source), BENCH_LOADER.command_layer(overrides)]
    file = BENCH_LOADER.load(layers, path, trust=trust)
    return file.with_values(job={"dir": os.path.abspath(job), "source": os.path.abspath(source)})


def _run_checks(file: JobFile) -> Iterator[Problem]:
    """Yield the problems for `explorer run` that no single key shows."""
    yield from _checks(file)
    yield from task_problems(file)
    yield from agent_problems(file)


def _serve_checks(file: JobFile) -> Iterator[Problem]:
    """Yield the problems for `explorer serve` that no single key shows."""
    yield from _checks(file)
    yield from gateway_problems(file, "explorer serve")
    if file.explorer.curriculum.enabled:
        text = "explorer serve chooses no tasks"
        yield Problem("explorer.curriculum.enabled", text, "leave [explorer.curriculum] out")
    if file.explorer.evaluation.named():
        text = "explorer serve evaluates nothing"
        yield Problem("explorer.evaluation.tasks", text, "leave [explorer.evaluation] out")
    if file.explorer.agent != AgentSection():
        text = "explorer serve starts no agent"
        yield Problem("explorer.agent", text, "leave [explorer.agent] out, or: explorer run CONFIG")
    if file.stages:
        text = "explorer serve takes no file with stages"
        yield Problem("stages", text, "explorer run CONFIG --stage NAME")


def _bench_checks(file: JobFile) -> Iterator[Problem]:
    """Yield the problems for `explorer bench` that no single key shows."""
    yield from _checks(file)
    if file.explorer.agent.is_given:
        text = "explorer bench has agents play nothing"
        yield Problem("explorer.agent", text, "leave [explorer.agent] out")
    if not file.explorer.evaluation.named():
        text = "there is no evaluation set: explorer.evaluation.tasks is missing"
        yield Problem("explorer.evaluation.tasks", text, "it names a JSONL file of tasks")
    if file.stages:
        text = "explorer bench takes no file with stages"
        yield Problem("stages", text, "leave --config out: each stage's directory has its configuration")


def _checks(file: JobFile) -> Iterator[Problem]:
    yield from _names(file)
    yield from lacking_problems(file)
    yield from _engine(file)
    yield from _teacher(file)
    rows = file.explorer_groups * file.data.group_size
    if rows > MAX_ROWS:
        key = "explorer.groups" if file.explorer.groups else "data.groups"
        yield Problem(key, f"{rows} rollouts are too many for a batch, which holds {MAX_ROWS} at most")
    yield from set_problems(file.explorer.evaluation)
    yield from reward_problems(file)


def _names(file: JobFile) -> Iterator[Problem]:
    for key in ("job.dir", "model.path"):
        if not attrgetter(key)(file):
            yield Problem(key, f"{key} is empty", "name one; is a shell variable unset?")
    name = file.explorer.name
    if name and not is_identity(name):
        hint = "letters, digits, '.', '_' and '-', 100 at most, none of '.' and '-' first"
        yield Problem("explorer.name", f"explorer.name = {name!r} is not a name for files", hint)


def _engine(file: JobFile) -> Iterator[Problem]:
    engine, temperature = file.explorer.engine, file.algorithm.temperature
    if engine.kind != "transformers" and temperature != 1 and not engine.processed_logprobs:
        yield Problem(
            "algorithm.temperature",
            f"algorithm.temperature = {temperature:g}: {engine.kind} says log-probs at temperature 1",
            "start the server with log-probs of the sampling temperature, and set"
            " explorer.engine.processed_logprobs = true",
        )
    if engine.kind == "tinker" and engine.options:
        yield Problem("explorer.engine.options", 'explorer.engine.options means nothing to kind = "tinker"')
    if engine.reload == "restart" and file.model.publishes_adapters:
        text = 'explorer.engine.reload = "restart" is for whole weights, and the job\'s steps are adapters'
        yield Problem("explorer.engine.reload", text, 'leave it out, or model.lora.publish = "merged"')
    if engine.kind == "transformers" and engine.address:
        yield Problem(
            "explorer.engine.address", 'explorer.engine.address means nothing to kind = "transformers"'
        )
    started = engine.command and engine.reload == "in_place" and engine.kind != "tinker"
    if engine.address.startswith(("http://", "https://")) or (started and not engine.address):
        pass
    elif engine.kind != "transformers":
        yield Problem(
            "explorer.engine.address",
            f'explorer.engine.kind = "{engine.kind}" needs explorer.engine.address',
            'address = "http://127.0.0.1:8000"',
        )
    yield from _command(engine)


def _teacher(file: JobFile) -> Iterator[Problem]:
    teacher, key = file.explorer.teacher, "explorer.teacher.address"
    if not teacher.address:
        if teacher != TeacherSection():
            yield Problem(key, f"[explorer.teacher] needs {key}", 'address = "http://127.0.0.1:8001"')
        return
    if not teacher.address.startswith(("http://", "https://")):
        yield Problem(key, f"{key} is no address of a server", 'address = "http://127.0.0.1:8001"')
    if file.algorithm.temperature != 1:
        text = "a teacher says log-probs at temperature 1, and responses are of another temperature"
        yield Problem("algorithm.temperature", text, "temperature = 1.0, or no teacher")


def _command(engine: InferenceSection) -> Iterator[Problem]:
    """Yield what keeps an explorer from starting its server."""
    if engine.kind in ("transformers", "tinker"):
        if engine.command or engine.reload == "restart":
            text = f"a command starts a server, and kind is {engine.kind}"
            yield Problem("explorer.engine.command", text, 'kind = "vllm"')
        return
    if not engine.command and engine.reload == "in_place":
        return
    try:
        words = shlex.split(engine.command)
    except ValueError as error:
        yield Problem("explorer.engine.command", f"explorer.engine.command is no command: {error}")
        return
    lacking = [name for name in ("{model}", "{port}") if not any(name in word for word in words)]
    if "{model}" in lacking or (lacking and not engine.address):
        text = f"the server needs a command with {' and '.join(lacking)}"
        yield Problem("explorer.engine.command", text, f'command = "{_SERVERS[engine.kind]}"')
    if not engine.model and engine.reload == "restart":
        text = 'explorer.engine.reload = "restart" needs explorer.engine.model: else it has another name each time'
        yield Problem("explorer.engine.model", text, 'model = "policy", and --served-model-name policy')


def _loader(check: Callable[[JobFile], Iterator[Problem]]) -> Loader:
    tables, required = ("job", "model", "sync", "explorer"), ("job", "model", "explorer")
    return Loader(tables=tables, required=required, check=check, hint="explorer config docs")


LOADER, BENCH_LOADER, SERVE_LOADER = map(_loader, (_run_checks, _bench_checks, _serve_checks))
