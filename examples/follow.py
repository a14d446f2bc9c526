"""A small explorer: waits for versions, leases each, loads and verifies its tensors, reports what it runs.

    python examples/follow.py JOB --name fast --until 24

`Synchronizer.get_model_state_dict` leases the version, reads it, checks every byte and releases it;
`confirm` reports what this explorer really runs. Any number of these may run, on any hosts.
"""

import argparse
import json
import sys
import time

from syncd.errors import TimedOutError, TryAgainError
from syncd.synchronizer import Synchronizer


def main() -> None:
    """Follow until the last step has been loaded."""
    options = _options()
    with (
        Synchronizer.open(options.job, role="explorer", identity=options.name) as explorer,
        open(options.log, "a", encoding="utf-8") if options.log else sys.stdout as log,
    ):
        step = -1
        while step < options.until:
            step = explorer.wait_new_model_state_dict(step, timeout=60)
            try:
                tensors, step = explorer.get_model_state_dict()
            except TryAgainError:
                continue  # superseded: continue with the newest
            explorer.confirm(step)
            log.write(json.dumps({"step": step, "tensors": len(tensors), "at": time.time()}) + "\n")
            log.flush()
            time.sleep(options.pause)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job")
    parser.add_argument("--name", required=True)
    parser.add_argument("--until", type=int, default=24, help="the last step to load")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that generating rollouts takes")
    parser.add_argument("--log", help="file that each loaded version is appended to")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except TimedOutError as error:
        sys.exit(f"{error}")
