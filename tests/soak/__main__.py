"""A soak from the command line: python -m soak --minutes 60 --seed 1

Its figures are one JSON document on stdout; it ends with 1 where anything was found wrong.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import fields

from soak.apart import go_apart
from soak.plan import Plan
from soak.run import soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    for field in fields(Plan):
        if field.name != "seconds":
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    plan = Plan(seconds=60 * given.pop("minutes"), **given)
    go_apart()
    place = tempfile.mkdtemp(prefix="soak-")
    found = soak(plan, place)
    print(json.dumps(found, indent=1))
    say(found, plan, place)


def say(found: dict, plan: Plan, place: str) -> None:
    """Print what came of it in a few lines, and end."""
    line = (
        f"{plan.seconds / 60:g} minutes, seed {plan.seed}: {sum(found['done'].values())} disturbances, "
        f"{found['versions']} versions, {found['loads']} loads, {found['terms']} terms: "
        f"{len(found['wrong'])} violations"
    )
    print(*found["cannot_be_done"], line, sep="\n", file=sys.stderr)
    if found["wrong"]:
        again = f"make soak-parts MINUTES={plan.seconds / 60:g} SEED={plan.seed}"
        print(f"again: {again}; logs: {place}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
