"""A soak from the command line: python -m soak --minutes 60 --seed 1"""

import argparse
import json
import shutil
import sys
import tempfile

from soak.run import Plan, soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gap", type=float, default=6.0, help="mean seconds between two disturbances")
    parser.add_argument("--explorers", type=int, default=8)
    options = parser.parse_args()
    plan = Plan(60 * options.minutes, options.seed, options.gap, options.explorers)
    place = tempfile.mkdtemp(prefix="soak-")
    found = soak(plan, place)
    print(json.dumps(found, indent=1))
    print(
        f"{options.minutes:g} minutes, seed {plan.seed}: {sum(found['done'].values())} disturbances, "
        f"{found['versions']} versions, {found['loads']} loads, {found['terms']} terms: "
        f"{len(found['wrong'])} violations"
    )
    if found["wrong"]:
        print(f"again: make soak-parts MINUTES={options.minutes:g} SEED={plan.seed}; logs: {place}")
        sys.exit(1)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
