"""Ways to spread a model over ranks that parts add to those of verl's FSDP: further values of `engine.strategy`.

A part registers a `Strategy` under `trainer.strategies`. Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem
from syncd.registered import registered

STRATEGIES = "trainer.strategies"  # the group of entry points, by the value of `engine.strategy`

FSDP = ("fsdp", "fsdp2")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to spread a model that is not FSDP's. Paths `module:name` are imported when a run begins."""

    noun: str  # what it is called in messages
    problems: Callable[[JobFile], Iterator[Problem]]  # yields what is wrong with its keys in the job's file
    # The packages that it needs besides verl, with the command that installs each.
    packages: Mapping[str, str]
    releases: frozenset[str]  # the releases of verl with which it runs
    engine: str  # the path of the engine
    model: str  # the path of what builds the model, as `trainer.engines.verl.models.build_model` does


def strategy_names() -> frozenset[str]:
    return frozenset({*FSDP, *registered(STRATEGIES)})


def strategy_of(config: JobFile) -> Strategy | None:
    name = config.engine.strategy
    if name in FSDP:
        return None
    point = registered(STRATEGIES).get(name)
    strategy: Strategy | None = point.load() if point is not None else None
    return strategy
