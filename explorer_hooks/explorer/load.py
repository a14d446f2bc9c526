"""The job's file, as an explorer reads it: one error reports all problems."""

import math
import shlex
from collections.abc import Iterator, Sequence
from operator import attrgetter

from explorer_hooks.explorer.config import AgentSection, ExplorerFile, InferenceSection, TeacherSection
from explorer_hooks.explorer.rewards import BUILT_IN
from explorer_hooks.explorer.stages import stage_layers
from syncd.experience.table import MAX_ROWS
from syncd.jobfile.keys import Keys
from syncd.jobfile.loader import Loader, layer_of, read_toml
from syncd.jobfile.problems import Problem
from syncd.protocol.layout import is_identity

KEYS = Keys(
    ExplorerFile,
    (
        "job.dir",
        "job.state_dir",
        "model.path",
        "model.lora.adapter",
        "explorer.tasks",
        "explorer.evaluation.tasks",
        "explorer.follow.stage",
        "explorer.gateway.directory",
        "sync.memory_dir",
    ),
)
"""The keys of the file, and those of them that name a file or directory."""


def load_file(path: str, overrides: Sequence[str] = (), stage: str | None = None) -> ExplorerFile:
    """Return what a file says to explorers, with the command line's `--section.key value` on top.

    Args:
        path: The file.
        overrides: Of the command line.
        stage: The one of its [[stages]] to explore, in its own directory; its model is known once it begins.

    Raises:
        ConfigError: The file cannot be read or is not TOML; else all its problems, in one error.
        UsageError: The overrides are not `--section.key value`.
    """
    table, _ = read_toml(path)
    layers = [*stage_layers(layer_of(table, path), stage), LOADER.command_layer(overrides)]
    file = LOADER.load(layers, path)
    return file.in_stage(stage) if stage is not None else file


def load_served_file(path: str, overrides: Sequence[str] = ()) -> ExplorerFile:
    """Return what a file says to `explorer serve`, with the command line's `--section.key value` on top.

    Raises:
        ConfigError: The file cannot be read or is not TOML; else all its problems, in one error.
        UsageError: The overrides are not `--section.key value`.
    """
    table, _ = read_toml(path)
    return SERVE_LOADER.load([layer_of(table, path), SERVE_LOADER.command_layer(overrides)], path)


def documentation() -> str:
    """Return the last part of docs/explorer-run.md: every key of [explorer]."""
    return KEYS.documentation("explorer")


def _run_checks(file: ExplorerFile) -> Iterator[Problem]:
    """Yield the problems for `explorer run` that no single key shows."""
    yield from _checks(file)
    if not file.explorer.tasks:
        yield Problem("explorer.tasks", "explorer.tasks is missing", "it names a JSONL file of tasks")
    if file.explorer.agent.is_given:
        yield from _gateway(file, "an agent ([explorer.agent])")
    yield from _agent(file.explorer.agent)


def _agent(agent: AgentSection) -> Iterator[Problem]:
    if not agent.is_given and agent != AgentSection():
        text = "[explorer.agent] needs explorer.agent.command or explorer.agent.function"
        yield Problem("explorer.agent", text, 'function = "my_agent:run"')
    if agent.command and agent.function:
        yield Problem("explorer.agent", "[explorer.agent] has a command and a function", "leave one out")
    if agent.function and not _is_import_path(agent.function):
        text = f'explorer.agent.function = "{agent.function}" is not package.module:function'
        yield Problem("explorer.agent.function", text)
    if agent.function and agent.reward == "function":
        text = "explorer.agent.function returns the reward, and explorer.agent.reward has another one read it"
        yield Problem("explorer.agent.reward", text, 'a command, or reward = "agent"')
    try:
        shlex.split(agent.command)
    except ValueError as error:
        yield Problem("explorer.agent.command", f"explorer.agent.command is no command: {error}")


def _serve_checks(file: ExplorerFile) -> Iterator[Problem]:
    """Yield the problems for `explorer serve` that no single key shows."""
    yield from _checks(file)
    yield from _gateway(file, "explorer serve")
    if file.explorer.agent != AgentSection():
        text = "explorer serve starts no agent"
        yield Problem("explorer.agent", text, "leave [explorer.agent] out, or: explorer run CONFIG")
    if file.stages:
        text = "explorer serve takes no file with stages"
        yield Problem("stages", text, "explorer run CONFIG --stage NAME")


def _gateway(file: ExplorerFile, who: str) -> Iterator[Problem]:
    """Yield what does not go together with the gateway."""
    section = file.explorer
    if section.teacher.address:
        text = f"{who} asks no teacher"
        yield Problem("explorer.teacher.address", text, "leave [explorer.teacher] out")
    if section.evaluation.tasks:
        text = f"{who} evaluates nothing"
        yield Problem("explorer.evaluation.tasks", text, "leave [explorer.evaluation] out")
    if section.engine.spans == "off":
        text = f'{who} needs the version of each token, and explorer.engine.spans = "off"'
        yield Problem("explorer.engine.spans", text, "leave it out")


def _checks(file: ExplorerFile) -> Iterator[Problem]:
    """Yield the problems that no single key shows."""
    yield from _names(file)
    yield from _engine(file)
    yield from _teacher(file)
    rows = file.groups * file.data.group_size
    if rows > MAX_ROWS:
        key = "explorer.groups" if file.explorer.groups else "data.groups"
        yield Problem(key, f"{rows} rollouts are too many for a batch, which holds {MAX_ROWS} at most")
    reward = file.explorer.reward.function
    if reward not in BUILT_IN and not _is_import_path(reward):
        known = ", ".join(sorted(BUILT_IN))
        text = f'explorer.reward.function = "{reward}" is neither {known} nor package.module:function'
        yield Problem("explorer.reward.function", text)


def _names(file: ExplorerFile) -> Iterator[Problem]:
    for key in ("job.dir", "model.path"):
        if not attrgetter(key)(file):
            yield Problem(key, f"{key} is empty", "name one; is a shell variable unset?")
    name = file.explorer.name
    if name and not is_identity(name):
        hint = "letters, digits, '.', '_' and '-', 100 at most, none of '.' and '-' first"
        yield Problem("explorer.name", f"explorer.name = {name!r} is not a name for files", hint)


def _engine(file: ExplorerFile) -> Iterator[Problem]:
    engine, temperature = file.explorer.engine, file.algorithm.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not math.isfinite(temperature) or temperature <= 0:
        yield Problem("algorithm.temperature", f"algorithm.temperature = {temperature!r} is not above 0")
    elif engine.kind != "transformers" and temperature != 1 and not engine.processed_logprobs:
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


def _teacher(file: ExplorerFile) -> Iterator[Problem]:
    teacher, key = file.explorer.teacher, "explorer.teacher.address"
    if not teacher.address:
        if teacher != TeacherSection():
            yield Problem(key, f"[explorer.teacher] needs {key}", 'address = "http://127.0.0.1:8001"')
        return
    if not teacher.address.startswith(("http://", "https://")):
        yield Problem(key, f"{key} is no address of a server", 'address = "http://127.0.0.1:8001"')
    if file.algorithm.get("temperature", 1.0) != 1:
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
        yield Problem("explorer.engine.command", text, 'command = "vllm serve {model} --port {port}"')
    if not engine.model and engine.reload == "restart":
        text = 'explorer.engine.reload = "restart" needs explorer.engine.model: else it has another name each time'
        yield Problem("explorer.engine.model", text, 'model = "policy", and --served-model-name policy')


def _is_import_path(text: str) -> bool:
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


_REQUIRED, _HINT = ("job", "model", "explorer"), "explorer config docs"

LOADER = Loader(KEYS, ExplorerFile, required=_REQUIRED, check=_run_checks, hint=_HINT)
SERVE_LOADER = Loader(KEYS, ExplorerFile, required=_REQUIRED, check=_serve_checks, hint=_HINT)
