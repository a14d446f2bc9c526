"""The simulated trainer: ranks that write with the real writer, crash together, resume where they may.

One rank is the first: it resumes, names each attempt, announces, and saves full checkpoints. What the ranks
tell each other they tell in memory, as a collective does; when one ends, all end.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from support.presences import BeatingPublisher

from simulator.deltas import Plan, Sealed, draw_plan, stored_files, write_part
from simulator.disk import SimDisk
from simulator.record import JOB, STATE, Record
from simulator.server import read_json
from simulator.world import Process, Program, World
from syncd.errors import StorageError, TimedOutError
from syncd.protocol.disk import list_if_there
from syncd.protocol.layout import ACTOR, FULL_CHECKPOINT, MANIFEST, Job, shard_name, step_name
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import Presence
from syncd.protocol.request import Request, read_requests, write_request
from syncd.protocol.version import read_marker, write_marker
from syncd.protocol.writer import StepWriter

_WAIT = 0.2
_OFTEN = 1.0
_EARLY = 0.5
_ZOMBIES = 0.5
_PATIENCE = 100.0
_VACATE_LOOKS = 20
_GARBAGE = (b"", b"-3", b"99999999999999999999", b"\xff\xfe", b"x")


@dataclass
class _Run:
    """One run of all ranks: what they tell each other."""

    number: int
    step: int = 0
    attempt: str = ""
    over: bool = False
    sealed: bool = False
    plan: Plan = field(default_factory=Plan)
    last: Sealed | None = None
    parts: dict[str, bytes] = field(default_factory=dict)
    arrived: dict[str, set[int]] = field(default_factory=dict)


class Trainer:
    """All ranks of a training job.

    Args:
        world: The world.
        record: What was really written.
        ranks: Number of writers of each step.
        pace: Seconds between two saves.
        full_every: Each step that is a multiple of this is a full checkpoint too.
        torn: Probability that a marker is written in place, torn first.
    """

    def __init__(
        self, world: World, record: Record, *, ranks: int, pace: float, full_every: int, torn: float
    ) -> None:
        self._world, self._record, self._random = world, record, world.fork()
        self._ranks, self._pace, self._full_every, self._torn = ranks, pace, full_every, torn
        # Steps of one and of two digits, so that a torn marker names another step.
        self._before = self._random.choice((0, 7, 97))
        self._run = _Run(0, over=True)
        self._saving: dict[Process, tuple[int, str]] = {}
        self._deltas: Random | None = None
        self._joined: dict[int, set[int]] = {rank: set() for rank in range(1, ranks + 1)}
        self._programs = [
            Program(f"rank{rank}", world.host(f"trainer{rank}"), self._main(rank))
            for rank in range(1, ranks + 1)
        ]

    @property
    def programs(self) -> list[Program]:
        """Return the programs of all ranks."""
        return self._programs

    def leave_zombies(self, random: Random) -> None:
        """Pause ranks now and then whose peers end in the middle of a save, instead of ending them too.

        Such a rank wakes up once a later start has sealed the same step, and continues its save.
        """

        def is_left(process: Process) -> bool:
            saving = self._saving.get(process)
            if saving is None or random.random() >= _ZOMBIES:
                return False
            process.held = lambda: not self._woken(process, *saving)
            self._world.counts["zombies"] += 1
            return True

        self._world.leaves_behind = is_left

    def _woken(self, process: Process, step: int, attempt: str) -> bool:
        manifest = read_json(self._world.tree, f"{JOB}/{step_name(step)}/{MANIFEST}")
        if manifest is None or manifest["attempt"] == attempt:
            return False
        self._world.counts["zombies woken"] += 1
        self._world.note(process, f"wakes up in {attempt}; {manifest['attempt']} is sealed")
        return True

    def store_deltas(self, random: Random) -> None:
        """Store some steps as deltas, and some whole with a shortcut; save often, so that chains grow."""
        self._deltas, self._pace = random, min(self._pace, _OFTEN)

    def start(self) -> None:
        """Start all ranks."""
        for program in self._programs:
            program.peers = self._programs
            self._world.start(program)

    def _main(self, rank: int) -> Callable[[Process], None]:
        return self._first if rank == 1 else lambda process: self._other(process, rank)

    def _first(self, process: Process) -> None:
        self._run.over = True
        run = self._run = _Run(self._run.number + 1)
        job = _job(process)
        job.disk.make_directory(job.state)
        presence = BeatingPublisher(
            job.disk, process, job.trainers, Presence("trainer", incarnation=str(run.number))
        )
        presence.prepare()
        step = self._resume(job)
        while run is self._run and not self._is_done():
            self._rest(process, presence, self._pace * (0.5 + self._random.random()))
            step += 1
            presence.update(step=step)
            if self._may_write(process, job, step):
                run.plan, run.parts = self._planned(job, run, presence), {}
                run.step, run.attempt, run.sealed = step, f"run{run.number}-{step}", False
                if self._random.random() < self._torn / 2 and not self._world.is_calm:
                    # As systems do whose mark is visible before its data.
                    write_marker(job.disk, job.marker, step)
                self._save(process, job, run, 1)
                # Two trainers of one job are kept apart elsewhere; a rank that woke up announces nothing.
                if run is self._run:
                    self._announce(process, job, run, presence)
                    self._keep_sealed(job, run)
        run.over = True
        if run is self._run:
            self._finish()

    def _other(self, process: Process, rank: int) -> None:
        while (run := self._run).over or run.number in self._joined[rank]:
            process.sleep(_WAIT)
        self._joined[rank].add(run.number)
        job, done = _job(process), ""
        while not run.over:
            process.sleep(_WAIT)
            if run.attempt != done:
                done = run.attempt
                self._save(process, job, run, rank)

    def _rest(self, process: Process, presence: BeatingPublisher, seconds: float) -> None:
        ends = process.monotonic() + seconds
        while (left := ends - process.monotonic()) > 0:
            process.sleep(min(left, 2.0))
            presence.beat()

    def _is_done(self) -> bool:
        """Say whether the last step was saved after all trouble had ended."""
        return self._record.announced_at > self._world.profile.trouble

    def _finish(self) -> None:
        for program in self._programs:
            program.wanted = False

    def _resume(self, job: Job) -> int:
        """Go back to the newest full checkpoint, and tell so by the marker."""
        job.disk.refresh(job.root)
        step = read_marker(job.disk, job.tracker).step
        if step is None:
            return self._before
        write_marker(job.disk, job.marker, step)
        if self._record.resume(step, self._world.now):
            self._world.counts["rewinds"] += 1
        return step

    def _may_write(self, process: Process, job: Job, step: int) -> bool:
        """Have the directory vacated that an abandoned run left at this step; pass over it if that fails."""
        job.disk.refresh(job.root)
        if MANIFEST not in {entry.name for entry in list_if_there(job.disk, job.step(step))}:
            return True
        digest = read_manifest(job.disk, job.step(step)).digest
        request = Request("vacate", step, asked_at=process.time(), digest=digest)
        write_request(job, request)
        for _ in range(_VACATE_LOOKS):
            process.sleep(2.0)
            # The answer counts: a step that is being removed may yet be put back.
            if request.identity in {other.identity for other in read_requests(job)}:
                continue
            if step_name(step) not in {entry.name for entry in job.disk.list(job.root)}:
                self._world.counts["vacated"] += 1
                return True
            break
        self._world.counts["passed over"] += 1
        return False

    def _planned(self, job: Job, run: _Run, presence: BeatingPublisher) -> Plan:
        """Decide how the next step is stored; what it is stored as changes of stays leased."""
        if self._deltas is None or run.last is None:
            return Plan()
        presence.update(leases=(run.last.manifest.step,))
        # Only what is still there once the lease is out is safe from retention.
        job.disk.refresh(job.root)
        plan = draw_plan(self._deltas, job, run.last)
        if plan.parent is None:
            presence.update(leases=())
            return plan
        self._world.counts["deltas" if plan.is_delta else "shortcuts"] += 1
        return plan

    def _keep_sealed(self, job: Job, run: _Run) -> None:
        """Take what was sealed as the parent of the next step, if that is known to be this attempt."""
        run.last = None
        if self._deltas is not None:
            manifest = read_manifest(job.disk, job.step(run.step))
            if manifest.attempt == run.attempt:
                run.last = Sealed(manifest, dict(run.parts))

    def _save(self, process: Process, job: Job, run: _Run, rank: int) -> None:
        self._saving[process] = run.step, run.attempt
        try:
            self._save_step(process, job, run, rank)
        finally:
            del self._saving[process]

    def _save_step(self, process: Process, job: Job, run: _Run, rank: int) -> None:
        writer = StepWriter(job, run.step, self._ranks, run.attempt, process)
        writer.begin()
        name = f"{ACTOR}/{shard_name(rank, self._ranks)}"
        content = run.parts[name] = shard(run.step, run.attempt, rank)
        plan = run.plan
        self._record.writing((run.step, run.attempt), name, content)
        self._record.storing((run.step, run.attempt), stored_files(plan, rank, self._ranks, name, content))
        write_part(writer, plan, rank, name, content)
        run.sealed |= writer.seal() is not None
        self._meet(process, run, rank)
        if rank == 1 and not run.sealed and writer.seal() is None:
            raise StorageError("all writers are done and their receipts are not to be seen", path=writer.path)

    def _meet(self, process: Process, run: _Run, rank: int) -> None:
        arrived = run.arrived.setdefault(run.attempt, set())
        arrived.add(rank)
        waited = 0.0
        while len(arrived) < self._ranks:
            process.sleep(_WAIT)
            waited += _WAIT
            if waited > _PATIENCE:
                raise TimedOutError("a rank is missing")

    def _announce(self, process: Process, job: Job, run: _Run, presence: BeatingPublisher) -> None:
        is_full = run.step % self._full_every == 0 or run.step == self._before + 1
        early = self._random.random() < _EARLY
        parents = (run.plan.parent.manifest.step,) if run.plan.parent else ()
        if is_full:
            # The step is not to be pruned while files are added to it.
            presence.update(leases=(*parents, run.step))
        if is_full and early:
            self._save_full(process, job, run.step)
        if self._random.random() < self._torn and not self._world.is_calm:
            self._tear(process, job, run.step)
        write_marker(job.disk, job.marker, run.step)
        self._record.announce((run.step, run.attempt), self._world.now)
        if is_full and not early:
            self._save_full(process, job, run.step)
        if is_full or parents:
            presence.update(leases=())

    def _save_full(self, process: Process, job: Job, step: int) -> None:
        process.sleep(self._random.choice((0.0, 4.0)))
        # Another host may have renamed the step here just now. The trainer asks again in the same way.
        job.disk.refresh(job.root)
        job.disk.replace(f"{job.step(step)}/{ACTOR}/optim_rank_1.pt", b"optimizer")
        job.disk.replace(f"{job.step(step)}/{FULL_CHECKPOINT}", b"")
        write_marker(job.disk, job.tracker, step)

    def _tear(self, process: Process, job: Job, step: int) -> None:
        """Write the marker in place as others do, so that it may be read half written."""
        torn = str(step)[: self._random.randint(0, len(str(step)) - 1)].encode()
        self._record.plant(job.marker, self._random.choice((torn, torn, *_GARBAGE)))
        process.sleep(self._random.choice((0.01, 0.3)))


def shard(step: int, attempt: str, rank: int) -> bytes:
    """Return a safetensors file of one tensor, whose size tells nothing about its content."""
    body = f"{step:04d} {attempt:>12} {rank:02d}".encode()
    tensor = {str(rank): {"dtype": "BF16", "shape": [len(body) // 2], "data_offsets": [0, len(body)]}}
    header = json.dumps(tensor).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


def _job(process: Process) -> Job:
    return Job(JOB, STATE, SimDisk(process.host, process))
