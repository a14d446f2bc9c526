"""The trainer's side: make steps complete, announce them, and have the daemon remove one that is in the way."""

import contextlib
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from syncd.client.own_presence import OwnPresence
from syncd.client.state_dict import encode_state
from syncd.client.wait import Poller
from syncd.errors import CorruptDataError, NotReadyError, TimedOutError, TryAgainError, UsageError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.layout import ACTOR, MANIFEST, Job, parse_attempt_name, parse_step_name, shard_name
from syncd.protocol.manifest import Manifest, missing_files, read_manifest, uri_problem
from syncd.protocol.owner import refuse_mirrored
from syncd.protocol.probe import Probe
from syncd.protocol.receipt import Receipt, read_receipts, whole_attempt
from syncd.protocol.request import Request, read_requests, remove_request, write_request
from syncd.protocol.version import read_marker
from syncd.protocol.writer import StepWriter

_CACHED = 240  # polls for which a mount may still show a step that is gone: a minute on a network mount


class StepAnnouncer:
    """Publishes the steps of one process.

    Args:
        own: The presence of the trainer; None for another process that publishes, such as a rank or a script.
        fence: As for `StepWriter`: a process that loses it can no longer announce. Empty for none.
    """

    def __init__(self, job: Job, own: OwnPresence | None, poller: Poller, fence: str = "") -> None:
        self._job, self._own, self._poller, self._fence = job, own, poller, fence
        self._announcing = threading.Lock()
        self._announced: tuple[int, str] | None = None

    def publish(
        self,
        state: Mapping[str, Any] | str | None,
        step: int,
        *,
        rewind: bool = False,
        probe: Probe | None = None,
    ) -> int:
        """Make a step of a state dict and announce it; see `Client.publish`."""
        refuse_mirrored(self._job, "a step of this process")
        if isinstance(state, str):
            self._write_remote(step, state, probe)
        elif state is not None:
            self._write(step, state, probe)
        elif probe is not None:
            hint = "give the probe to StepWriter.receipt, as writer 1"
            raise UsageError("a step that is complete already takes no probe", hint=hint)
        return self._announce(step, rewind=rewind)

    def publish_received(self, step: int | None = None, world_size: int | None = None) -> int:
        """Seal and announce a step whose writers have all left receipts; see `Client.publish_received`."""
        refuse_mirrored(self._job, "a step of this process")
        wanted = step if step is not None else self._newest_directory()
        receipts = [] if wanted is None else self._receipts(wanted)
        if world_size is not None:
            receipts = [receipt for receipt in receipts if receipt.world_size == world_size]
        whole = whole_attempt(receipts)
        if wanted is None or whole is None:
            return self.announced_step() or 0
        if not self._is_sealed(wanted):
            self._writer(wanted, whole[0].attempt, whole[0].world_size).seal()
        return self._announce(wanted, rewind=False)

    def count_receipts(self, step: int) -> int:
        receipts = self._receipts(step)
        last = max(receipts, key=lambda receipt: receipt.written_at, default=None)
        return sum(last is not None and receipt.attempt == last.attempt for receipt in receipts)

    def vacate(self, step: int, timeout: float | None = None) -> None:
        """Have the daemon remove a complete step; see `Client.vacate`."""
        digest = self._digest_in_the_way(step)
        if digest is None:
            return
        asked_at = self._poller.clock.time()
        request = Request("vacate", step, asked_at=asked_at, digest=digest, reason="to be written again")
        what = f"waiting for step {step} to be vacated"
        try:
            write_request(self._job, request)
            # A missing step is no answer yet: the daemon may still put back a step that it removes.
            self._poller.until(lambda: not self._is_open(request) or None, what, timeout)
            cached = _CACHED * self._poller.pace.seconds
            self._poller.until(lambda: self._digest_in_the_way(step) != digest or None, what, cached)
        except TimedOutError:
            if self._is_open(request):
                raise
            path, hint = self._job.step(step), f"syncd ls {self._job.root}"
            raise TryAgainError(f"the daemon keeps step {step}", path=path, hint=hint) from None
        finally:
            with contextlib.suppress(OSError):
                remove_request(self._job, request.identity)

    def announced_step(self) -> int | None:
        """Return the step that the marker names, None without a marker; the trainer's engine may write it too."""
        return read_marker(self._job.disk, self._job.marker).step

    def position(self) -> dict[str, Any]:
        """Return the fields of the presence that name the step announced last."""
        step = self.announced_step()
        info_before = self._own.info if self._own else {}
        info = {key: value for key, value in info_before.items() if key != "announced"}
        if self._announced is not None and self._announced[0] == step:
            info["announced"] = self._announced[1]
        return {"step": step, "info": info}

    def _is_open(self, request: Request) -> bool:
        return any(other.identity == request.identity for other in read_requests(self._job))

    def _digest_in_the_way(self, step: int) -> str | None:
        """Return the digest of a step's manifest, "" for an unreadable one, None if no manifest is there."""
        self._job.disk.refresh(self._job.root)
        if not self._is_sealed(step):
            return None
        try:
            return read_manifest(self._job.disk, self._job.step(step)).digest
        except MISSING:
            return None
        except CorruptDataError:
            return ""

    def _is_sealed(self, step: int) -> bool:
        return any(entry.name == MANIFEST for entry in list_if_there(self._job.disk, self._job.step(step)))

    def _write(self, step: int, state: Mapping[str, Any], probe: Probe | None) -> None:
        if not state:
            raise UsageError(f"the state dict of step {step} holds no tensor", path=self._job.step(step))
        with self._attempt(step) as writer:
            shard = writer.write(f"{ACTOR}/{shard_name(1, 1)}", encode_state(state), tensors=len(state))
            writer.receipt(1, [shard], probe=probe)
            writer.seal()

    def _write_remote(self, step: int, uri: str, probe: Probe | None) -> None:
        if problem := uri_problem(uri):
            raise UsageError(problem, hint="a URI such as tinker://run/weights/7, or an absolute path")
        with self._attempt(step) as writer:
            writer.receipt(1, [], probe=probe)
            writer.seal(kind="remote", uri=uri)

    @contextlib.contextmanager
    def _attempt(self, step: int) -> Iterator[StepWriter]:
        """Yield the one writer of a step; if the block fails, nothing of what it has written stays."""
        writer = self._writer(step)
        writer.begin()
        try:
            yield writer
        except BaseException:
            writer.discard()
            raise

    def _writer(self, step: int, attempt: str = "", world_size: int = 1) -> StepWriter:
        name, clock = attempt or uuid.uuid4().hex, self._poller.clock
        return StepWriter(self._job, step, world_size, name, clock, fence=self._fence)

    def _announce(self, step: int, *, rewind: bool) -> int:
        with self._announcing:
            manifest = self._complete(step)
            named = self.announced_step()
            if named is not None and named > step and not rewind:
                return named
            self._writer(step).announce()
            self._announced = step, manifest.digest
        if self._own is not None:
            self._own.try_change(**self.position())
        return step

    def _complete(self, step: int) -> Manifest:
        path = self._job.step(step)
        try:
            manifest = read_manifest(self._job.disk, path)
        except MISSING:
            hint = f"syncd ls {self._job.root}"
            raise NotReadyError(f"step {step} is not complete", path=path, hint=hint) from None
        if wrong := missing_files(self._job.disk, path, manifest):
            raise CorruptDataError(f"step {step} is not complete: {wrong[0]}", path=path)
        return manifest

    def _receipts(self, step: int) -> list[Receipt]:
        names = [entry.name for entry in self._job.disk.list(self._job.root)]
        places = [name for name in names if step in (parse_step_name(name), parse_attempt_name(name))]
        return [
            receipt
            for name in places
            for receipt in read_receipts(self._job.disk, f"{self._job.root}/{name}")
        ]

    def _newest_directory(self) -> int | None:
        """Return the newest step that has a directory, complete or not."""
        names = [entry.name for entry in self._job.disk.list(self._job.root) if entry.kind == "directory"]
        steps = [step for name in names for step in (parse_step_name(name), parse_attempt_name(name))]
        return max((step for step in steps if step is not None), default=None)
