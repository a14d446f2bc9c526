"""The job's file, as `explorer serve` reads it."""

from collections.abc import Iterator, Sequence

from explorer_hooks.parts.agents.checks import gateway_problems
from explorer_hooks.parts.agents.tables import AgentSection
from explorer_hooks.run.load import explorer_loader, file_problems
from syncd.jobfile.loader import read_toml
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem


def load_served_file(path: str, overrides: Sequence[str] = (), *, trust: bool = False) -> JobFile:
    return LOADER.load([read_toml(path).layer(), LOADER.command_layer(overrides)], path, trust=trust)


def _serve_checks(file: JobFile) -> Iterator[Problem]:
    yield from file_problems(file, "serve")
    yield from gateway_problems(file, "explorer serve")
    if file.explorer.curriculum.enabled:
        text = "explorer serve chooses no tasks"
        yield Problem("explorer.curriculum.enabled", text, "leave [explorer.curriculum] out")
    if file.explorer.evaluation.named():
        text = "explorer serve evaluates nothing"
        yield Problem("explorer.evaluation.tasks", text, "leave [explorer.evaluation] out")
    if file.explorer.part(AgentSection) != AgentSection():
        text = "explorer serve starts no agent"
        yield Problem("explorer.agent", text, "leave [explorer.agent] out, or: explorer run CONFIG")
    if file.stages:
        text = "explorer serve takes no file with stages"
        yield Problem("stages", text, "explorer run CONFIG --stage NAME")


LOADER = explorer_loader(_serve_checks)
