"""The job's file, as an explorer reads it: one error reports all problems."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from explorer_hooks.run.extensions import CHECKS, lacking_problems
from explorer_hooks.run.stages import stage_layers
from explorer_hooks.run.task_checks import reward_problems, task_problems
from syncd.experience.table import MAX_ROWS
from syncd.jobfile.evaluation import set_problems
from syncd.jobfile.explorer_sections import InferenceSection
from syncd.jobfile.loader import Loader, read_toml
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.protocol.layout import is_identity
from syncd.registered import registered

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


def _run_checks(file: JobFile) -> Iterator[Problem]:
    yield from file_problems(file, "run")
    yield from task_problems(file)


def file_problems(file: JobFile, verb: str) -> Iterator[Problem]:
    """Yield the problems that no single key shows, those of parts' tables too; `verb`: `run`, or a part's command."""
    yield from _names(file)
    yield from lacking_problems(file)
    yield from _engine(file)
    rows = file.explorer_groups * file.data.group_size
    if rows > MAX_ROWS:
        key = "explorer.groups" if file.explorer.groups else "data.groups"
        yield Problem(key, f"{rows} rollouts are too many for a batch, which holds {MAX_ROWS} at most")
    yield from set_problems(file.explorer.evaluation)
    yield from reward_problems(file)
    for point in registered(CHECKS).values():
        yield from point.load()(file, verb)


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
            f"algorithm.temperature = {temperature:g}: {engine.kind} gives log-probs at temperature 1",
            "start the server with log-probs of the sampling temperature, and set"
            " explorer.engine.processed_logprobs = true",
        )
    if engine.reload == "restart" and file.model.publishes_adapters:
        text = 'explorer.engine.reload = "restart" is for whole weights, and the job\'s steps are adapters'
        yield Problem("explorer.engine.reload", text, 'leave it out, or model.lora.publish = "merged"')
    if engine.kind == "transformers" and engine.address:
        yield Problem(
            "explorer.engine.address", 'explorer.engine.address has no effect with kind = "transformers"'
        )
    started = engine.command and engine.reload == "in_place" and engine.kind in _SERVERS
    if engine.address.startswith(("http://", "https://")) or (started and not engine.address):
        pass
    elif engine.kind != "transformers":
        yield Problem(
            "explorer.engine.address",
            f'explorer.engine.kind = "{engine.kind}" needs explorer.engine.address',
            'address = "http://127.0.0.1:8000"',
        )
    yield from _command(engine)


def _command(engine: InferenceSection) -> Iterator[Problem]:
    if engine.kind not in _SERVERS:
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


def explorer_loader(check: Callable[[JobFile], Iterator[Problem]]) -> Loader:
    tables, required = ("job", "model", "sync", "explorer"), ("job", "model", "explorer")
    return Loader(tables=tables, required=required, check=check, hint="explorer config docs")


LOADER = explorer_loader(_run_checks)
