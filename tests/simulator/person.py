"""A simulated person at the command line: pins, unpins, and asks for a rollback."""

from random import Random

from simulator.disk import SimDisk
from simulator.record import JOB, STATE
from simulator.world import Process
from syncd.protocol.disk import list_if_there
from syncd.protocol.layout import Job, parse_step_name
from syncd.protocol.request import Pin, Request, read_pins, remove_pin, write_pin, write_request

_PINS, _UNPINS = 0.5, 0.8


class Person:
    """Does something now and then while there is trouble.

    Args:
        random: Decides what and when.
    """

    def __init__(self, random: Random) -> None:
        self._random = random

    def main(self, process: Process) -> None:
        """Act until the trouble ends."""
        job = Job(JOB, STATE, SimDisk(process.host, process))
        while process.world.now < process.world.profile.trouble:
            process.sleep(self._random.uniform(2, 30))
            steps = [parse_step_name(entry.name) for entry in list_if_there(job.disk, job.root)]
            there = sorted(step for step in steps if step is not None)
            if there and process.world.now < process.world.profile.trouble:
                self._act(process, job, self._random.choice(there))
        process.program.wanted = False

    def _act(self, process: Process, job: Job, step: int) -> None:
        chance = self._random.random()
        if chance < _PINS:
            write_pin(job, Pin(step, "a person wants it", process.time()))
        elif chance < _UNPINS:
            for pinned in sorted(read_pins(job)):
                remove_pin(job, pinned)
        else:
            write_request(job, Request("rollback", step, asked_at=process.time()))
