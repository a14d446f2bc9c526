"""The trainer's side: steps that become complete, are announced, and are got out of the way."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from syncd.client.base import Base, public
from syncd.client.payload import encode_state
from syncd.client.wait import Wait
from syncd.errors import CorruptDataError, NotReadyError, TimedOutError, TryAgainError, UsageError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.layout import ACTOR, MANIFEST, parse_attempt_name, parse_step_name, shard_name
from syncd.protocol.manifest import Manifest, missing_files, read_manifest, uri_problem
from syncd.protocol.marker import read_marker, write_marker
from syncd.protocol.memory import MEMORY_KEY, MemoryDirectory
from syncd.protocol.receipt import Receipt, read_receipts, whole_attempt
from syncd.protocol.request import Request, read_requests, remove_request, write_request
from syncd.protocol.writer import StepWriter

_CACHED = 240
"""Looks for which a mount may still show a step that has gone: a minute where it is a network mount."""


class Publishing(Base):
    """Publishing steps."""

    @public
    def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int, *, rewind: bool = False
    ) -> int:
        """Make a step of a state dict and announce it.

        Args:
            model_state_dict: Tensors by name (numpy arrays, torch tensors, or (dtype, shape, bytes)); the URI
            of a
                payload that is elsewhere; None for a step that is complete already.
            trainer_step: The step.
            rewind: Whether explorers shall go back to a step below the one that was announced last. Without
            it
                an older step becomes complete and is not announced: saves may finish in another order.

        Returns:
            The step that is announced now.

        Raises:
            UsageError: The step is complete already and is handed in again, or the state dict holds no tensor.
            NotReadyError: It is not complete, and None is handed in.
        """
        if self.role == "explorer":
            raise UsageError("an explorer publishes no steps")
        if isinstance(model_state_dict, str):
            self._write_remote(trainer_step, model_state_dict)
        elif model_state_dict is not None:
            self._write(trainer_step, model_state_dict)
        return self._announce(trainer_step, rewind=rewind)

    @public
    def tell_copies(self, place: MemoryDirectory | None) -> None:
        """Say where this trainer keeps copies of steps in its host's memory, or that it keeps none any more."""
        trainer = self._as("trainer", "tell_copies")
        others = {key: value for key, value in trainer.presence.info.items() if key != MEMORY_KEY}
        trainer.change(info=others if place is None else {**others, MEMORY_KEY: place.document()})

    @public
    def set_model_state_dict_with_step_num(
        self, step_num: int | None = None, world_size: int | None = None
    ) -> int:
        """Seal and announce a step once all its writers have left their receipts. Any of them may call this.

        Args:
            step_num: The step; the newest of which there is a directory unless given.
            world_size: The number of writers; the one of the receipts unless given.

        Returns:
            The model version: the step that is announced now, 0 before the first.
        """
        if self.role == "explorer":
            raise UsageError("an explorer publishes no steps")
        step = step_num if step_num is not None else self._newest_directory()
        receipts = [] if step is None else self._receipts(step)
        if world_size is not None:
            receipts = [receipt for receipt in receipts if receipt.world_size == world_size]
        whole = whole_attempt(receipts)
        if step is None or whole is None:
            return read_marker(self.job.disk, self.job.marker).step or 0
        if not self._is_sealed(step):
            StepWriter(self.job, step, whole[0].world_size, whole[0].attempt, self.clock).seal()
        return self._announce(step, rewind=False)

    @public
    def checkpoint_shard_counter(self, step: int) -> int:
        """Return how many writers of a step are done: those of the save that wrote last."""
        receipts = self._receipts(step)
        last = max(receipts, key=lambda receipt: receipt.written_at, default=None)
        return sum(last is not None and receipt.attempt == last.attempt for receipt in receipts)

    def vacating(self, step: int, timeout: float | None = None) -> Wait[None]:
        """Have the daemon take a complete step away, so that it can be written again after a rewind.

        The marker must name an earlier step by then (`set_model_state_dict(None, earlier, rewind=True)`).

        Raises:
            TryAgainError: The daemon keeps the step.
            TimedOutError: The daemon has not done it, or there is none.
        """
        self._as("trainer", "vacate")
        in_the_way = self._manifest_in_the_way(step)
        if in_the_way is None:
            return
        asked_at, reason = self.clock.time(), "to be written again"
        request = Request("vacate", step, asked_at=asked_at, digest=in_the_way, reason=reason)
        what = f"waiting for step {step} to be vacated"
        try:
            write_request(self.job, request)
            yield from self._until(lambda: self._is_answered(request) or None, timeout, what)
            yield from self._until(lambda: self._has_gone(request) or None, _CACHED * self.pace.seconds, what)
        except TimedOutError:
            if self._is_open(request):
                raise
            path, hint = self.job.step(step), f"syncd ls {self.job.root}"
            raise TryAgainError(f"the daemon keeps step {step}", path=path, hint=hint) from None
        finally:
            with contextlib.suppress(OSError):
                remove_request(self.job, request.identity)

    def _is_answered(self, request: Request) -> bool:
        # That the step is not there says nothing yet: while the daemon removes it, it may still put it back.
        return not self._is_open(request)

    def _is_open(self, request: Request) -> bool:
        return any(other.identity == request.identity for other in read_requests(self.job))

    def _has_gone(self, request: Request) -> bool:
        return self._manifest_in_the_way(request.step) != request.digest

    def _manifest_in_the_way(self, step: int) -> str | None:
        """Return the digest of a step's manifest, "" for an unreadable one, None where nothing is sealed."""
        self.job.disk.refresh(self.job.root)
        if not self._is_sealed(step):
            return None
        try:
            return read_manifest(self.job.disk, self.job.step(step)).digest
        except MISSING:
            return None
        except CorruptDataError:
            return ""

    def _is_sealed(self, step: int) -> bool:
        return any(entry.name == MANIFEST for entry in list_if_there(self.job.disk, self.job.step(step)))

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        if not state:
            raise UsageError(f"the state dict of step {step} holds no tensor", path=self.job.step(step))
        writer = self._begun(step)
        shard = writer.write(f"{ACTOR}/{shard_name(1, 1)}", encode_state(state), tensors=len(state))
        writer.receipt(1, [shard])
        writer.seal()

    def _write_remote(self, step: int, uri: str) -> None:
        if problem := uri_problem(uri):
            raise UsageError(problem, hint="a URI such as tinker://run/weights/7, or an absolute path")
        writer = self._begun(step)
        writer.receipt(1, [])
        writer.seal(kind="remote", uri=uri)

    def _begun(self, step: int) -> StepWriter:
        writer = StepWriter(self.job, step, 1, uuid.uuid4().hex, self.clock, fence=self.fence)
        writer.begin()
        return writer

    def _announce(self, step: int, *, rewind: bool) -> int:
        with self._announcing:
            manifest = self._complete(step)
            named = read_marker(self.job.disk, self.job.marker).step
            if named is not None and named > step and not rewind:
                return named
            write_marker(self.job.disk, self.job.marker, step, via=self.fence or None)
            self._announced = step, manifest.digest
        if self._member is not None and self.role == "trainer":
            self._member.settle(**self._position())
        return step

    def _complete(self, step: int) -> Manifest:
        path = self.job.step(step)
        try:
            manifest = read_manifest(self.job.disk, path)
        except MISSING:
            hint = f"syncd ls {self.job.root}"
            raise NotReadyError(f"step {step} is not complete", path=path, hint=hint) from None
        if wrong := missing_files(self.job.disk, path, manifest):
            raise CorruptDataError(f"step {step} is not complete: {wrong[0]}", path=path)
        return manifest

    def _position(self) -> dict[str, Any]:
        """Return the step that was announced last, by the marker: the trainer's engine may write it too."""
        step = read_marker(self.job.disk, self.job.marker).step
        info = {key: value for key, value in self._info().items() if key != "announced"}
        if self._announced is not None and self._announced[0] == step:
            info["announced"] = self._announced[1]
        return {"step": step, "info": info}

    def _info(self) -> dict[str, Any]:
        return self._member.presence.info if self._member else {}

    def _receipts(self, step: int) -> list[Receipt]:
        names = [entry.name for entry in self.job.disk.list(self.job.root)]
        places = [name for name in names if step in (parse_step_name(name), parse_attempt_name(name))]
        return [one for name in places for one in read_receipts(self.job.disk, f"{self.job.root}/{name}")]

    def _newest_directory(self) -> int | None:
        return max(self._step_directories(), default=None)

    def _step_directories(self) -> Iterator[int]:
        for entry in self.job.disk.list(self.job.root):
            step = parse_step_name(entry.name)
            step = parse_attempt_name(entry.name) if step is None else step
            if step is not None and entry.kind == "directory":
                yield step
