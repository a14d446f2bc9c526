"""A daemon that takes a number of looks as fast as it can, its clock moved by hand: ticks.py JOB LOOKS

Each look comes ten seconds after the one before, so every sixth examines everything anew.
"""

import sys

from support.jobs import start

from syncd.protocol.layout import Job

SECONDS = 10.0


def main(root, looks):
    daemon, heard, clock = start(Job.at(root))
    for _ in range(int(looks)):
        daemon.tick()
        clock.at += SECONDS
    assert heard.of("error") == []
    daemon.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
