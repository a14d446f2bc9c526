"""Which parts a soak has, and how each is started."""

import os
import sys
from collections.abc import Iterator

from soak.bed import Bed
from soak.parts import Part
from soak.plan import Plan
from soak.schedule import DAEMONS, TRAINER

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EVENTS_BYTES = 128 << 10
"""Small, so that the journal is rotated often."""

_QUICK = 0.1
_SETTINGS = "keep_last = 2\ntrash_grace = 0.5\npartial_grace = 30.0\n"


def crew(plan: Plan, where: Bed, backs: list[int]) -> dict[str, Part]:
    """Return all parts by name, none of them started.

    Args:
        plan: What the soak is.
        where: Where it runs.
        backs: By how many steps the trainer's next starts go back; each start takes one.
    """
    parts = [*_daemons(plan, where), _trainer(plan, where, backs), *_explorers(plan, where)]
    return {part.name: part for part in parts}


def _daemons(plan: Plan, where: Bed) -> Iterator[Part]:
    config = f"{where.place}/daemon.toml"
    with open(config, "w", encoding="ascii") as file:
        file.write(f"[daemon]\nevents_bytes = {EVENTS_BYTES}\nttl = {plan.ttl}\n{_SETTINGS}")
        file.write(f"takeover = {plan.takeover}\n")
    for name in DAEMONS:
        options = ("--config", config, "--log-format", "json")
        textfile = ("--metrics-textfile", f"{where.place}/{name}.prom")
        yield _part(where, name, "-m", "syncd", "watch", where.job, *options, *textfile)


def _trainer(plan: Plan, where: Bed, backs: list[int]) -> Part:
    program = (f"{TESTS}/programs/soak_trainer.py", where.job, where.journal(TRAINER))
    part = _part(where, TRAINER, *program, "--pause", str(plan.pause), "--ttl", str(plan.ttl))
    command = part.command
    part.command = lambda: [*command(), *(["--back", str(backs.pop())] if backs else [])]
    return part


def _explorers(plan: Plan, where: Bed) -> Iterator[Part]:
    for number, name in enumerate(plan.names):
        program = (f"{TESTS}/programs/soak_explorer.py", where.job, name, where.journal(name))
        staged = ("--stage", f"{where.place}/stage") if number % 2 else ()
        # Some are slower than the trainer: only their leases keep what they read.
        hold = plan.slow if number % 4 == 2 else _QUICK
        yield _part(where, name, *program, "--ttl", str(plan.ttl), "--hold", str(hold), *staged)


def _part(where: Bed, name: str, *argv: str) -> Part:
    alone = ["unshare", "--mount", "--propagation", "slave"] if "cut" in where.kinds else []
    own = {"PYTHONPATH": f"{os.path.dirname(TESTS)}:{TESTS}", "XDG_RUNTIME_DIR": where.place}
    return Part(name, lambda: [*alone, sys.executable, *argv], where.log(name), os.environ | own)
