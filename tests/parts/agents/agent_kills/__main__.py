"""Kills of agents, gateways, engines and writers: python -m agent_kills --kills 1000 --seed 1

The figures are one JSON document on stdout; it ends with 1 where anything was found wrong.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time

from agent_kills.chaos import Chaos, StalledError
from agent_kills.judging import compared, judged
from agent_kills.parts import Parts, write_model
from support.ports import free_port

import explorer_hooks.parts.agents.run_agents
import explorer_hooks.parts.agents.serve  # noqa: F401 - what explorers import, before they are forked
from explorer_hooks.run.tokens import open_tokens

MODES = ("run", "serve")
COMPARED = 100
"""Kills from which on lengths are compared with those of an undisturbed run."""

LEAST = 0.05
"""The p-value up to which lengths differ."""

SHOWN = 20
UNDISTURBED = 1_000_003
"""Added to the seed of answers for the run without kills."""


def main():
    parser = argparse.ArgumentParser(prog="agent_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--groups", type=float, default=1.0, help="for each kill")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    place = tempfile.mkdtemp(prefix="agent-kills-")
    write_model(f"{place}/model")
    open_tokens(f"{place}/model", trust_remote_code=False)  # imports what each start of an explorer needs
    kills, groups = options.kills // 2, max(int(options.groups * options.kills / 2), 2)
    found = {mode: played(place, mode, mode, groups, kills, options.seed) for mode in MODES}
    report = {name: said for name, (said, _) in found.items()}
    if options.kills >= COMPARED:
        said, alone = played(place, "undisturbed", "run", 2 * groups, 0, options.seed + UNDISTURBED)
        report["undisturbed"] = said
        for mode in MODES:
            report[mode] |= distances(found[mode][1], alone)
    print(json.dumps(report, indent=1))
    if any(said["wrong"] for said in report.values()):
        print(f"left behind: {place}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(place)


def distances(verdict, alone):
    """Return how far the lengths of a run's rollouts are from those of an undisturbed one; note what is too far."""
    said = {}
    for kind in ("turns", "tokens"):
        ones, others = getattr(verdict, kind), getattr(alone, kind)
        distance, chance = compared(ones, others)
        said[kind] = {
            "mean": round(sum(ones) / len(ones), 3),
            "undisturbed": round(sum(others) / len(others), 3),
            "distance": round(distance, 4),
            "p": round(chance, 4),
        }
        if chance <= LEAST:
            verdict.wrong.append(f"{kind} of rollouts: distance {distance:.4f}, p = {chance:.4f}")
    return {**said, "wrong": verdict.wrong[:SHOWN]}


def played(place, name, mode, groups, kills, seed):
    """Play groups while parts are killed; return figures and verdict."""
    begin = time.monotonic()
    own = f"{place}/{name}"
    os.mkdir(own)
    os.symlink("../model", f"{own}/model")
    parts = Parts(own, mode, groups, seed, free_port())
    chaos = Chaos(parts, kills, seed)
    stalled = []
    try:
        chaos.run()
        parts.finish()
    except StalledError as error:
        stalled = [str(error)]
    finally:
        parts.end()
    verdict = judged(parts)
    verdict.wrong += stalled
    said = {
        "wrong": verdict.wrong[:SHOWN],
        "kills": chaos.done,
        "seconds": round(time.monotonic() - begin),
        "groups": groups,
        "dropped": dict(verdict.dropped),
        "rollouts": verdict.rollouts,
        "attempts": verdict.attempts,
    }
    print(name, json.dumps(said), file=sys.stderr)
    return said, verdict


if __name__ == "__main__":
    main()
