"""The explorer's side: which version is published, waiting for a newer one, and confirming what runs."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from syncd.client.base import public
from syncd.client.lease import Leasing
from syncd.client.own_presence import Member
from syncd.client.sync_policy import NOTHING, is_new
from syncd.client.wait import Wait
from syncd.errors import CorruptDataError, StorageError, UsageError
from syncd.protocol.disk import MISSING, list_if_there
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import Presence
from syncd.protocol.round import AHEAD, is_overtaken, is_same
from syncd.protocol.version import Pair, Version

_LOOKS_PER_TRAINER = 4
"""The version is looked at this many times as often as the trainers: it is what is waited for."""


class Following(Leasing):
    """Following the published version."""

    @public
    def get_latest_model_version(self) -> int:
        """Return the published step, 0 before the first."""
        version = self._newest()
        return version.step if version else 0

    @public
    def get_latest_version(self) -> Version | None:
        """Return the published version with its generation, None before the first."""
        return self._newest()

    @public
    def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:  # noqa: FBT001, FBT002
        """Return the directory to load, None before the first version; for kind remote its URI.

        Args:
            use_huggingface: Prefer the Hugging Face export beside the weights, where the step has one.
        """
        version = self._newest()
        if version is None:
            return None
        path = self._path(version)
        exported = use_huggingface and version.kind != "remote" and self._has_directory(path, "huggingface")
        return f"{path}/huggingface" if exported else path

    @public
    def confirm(self, version: int | Pair | Version | None) -> None:
        """Publish that this explorer really runs a version. Call it after the load, never before.

        Args:
            version: What runs; None for none of this job's, as after a restart of the engine.

        Raises:
            UsageError: The step was never offered to this explorer.
        """
        explorer = self._as("explorer", "confirm")
        pair = None if version is None else self._pair_of(version)
        if pair is not None:
            self._followed.keep(pair[1], pair)
        digest = version.digest if isinstance(version, Version) else self._digest_of(pair)
        self._apply(explorer, pair, digest)

    @public
    def describe(self, fields: Mapping[str, Any], *, now: bool = True) -> None:
        """Publish what else people should see of this explorer or trainer, in the `info` of its presence.

        Args:
            fields: Values that JSON has, by name; None takes a field away. The others stay.
            now: Whether it is written at once; else with whatever is written next, a heartbeat at the latest.
        """
        member = self._as("trainer" if self.role == "trainer" else "explorer", "describe")
        merged = {**member.presence.info, **fields}
        info = {name: value for name, value in merged.items() if value is not None}
        if info == member.presence.info:
            return
        if now:
            member.change(info=info)
        else:
            member.note(info=info)

    def waiting_for_new(
        self,
        current_version: int = NOTHING,
        no_wait: bool = False,  # noqa: FBT001, FBT002
        timeout: float | None = None,
    ) -> Wait[int]:
        """Wait until there is a version that this explorer does not have.

        Returns earlier, with `current_version`, when the trainer answers that there is nothing newer, or when
        the trainer that was there has stopped or died.

        Args:
            current_version: The step that the explorer has; -1 for none.
            no_wait: Return at once.
            timeout: Seconds to wait; the default of the synchronizer unless given.

        Returns:
            The step to load, or `current_version`.

        Raises:
            TimedOutError: Nothing came.
        """
        with contextlib.nullcontext() if no_wait else contextlib.suppress(OSError, StorageError):
            news = self._news(current_version, self._glance())
            if news is not None or no_wait:
                return current_version if news is None else news
        with self._member.asking() if self._member else contextlib.nullcontext(0) as asked:
            what = f"waiting for a version after {current_version}"
            look = lambda: self._news_or_answer(current_version, asked)  # noqa: E731
            return (yield from self._until(look, timeout, what))

    def _news_or_answer(self, current: int, asked: int) -> int | None:
        answers = self._answers(asked)
        # The version is read after the answer: what was announced before the answer is not missed.
        version = self._glance()
        news = self._news(current, version)
        if news is None and any(has_caught_up(version, trainer) for trainer in answers):
            return current
        return news

    def _answers(self, asked: int) -> Sequence[Presence]:
        """Return the trainers that say that nothing more comes for this ask."""
        now = self.clock.monotonic()
        if now - self._looked_at_trainers >= _LOOKS_PER_TRAINER * self.pace.seconds:
            self.trainers.look()
            self._looked_at_trainers = now
        me = self.identity or ""
        answers = [one for one in self.trainers.last().values() if asked and one.answered.get(me, 0) >= asked]
        return answers or self.trainers.departed() or ()

    def _news(self, current: int, version: Version | None) -> int | None:
        if version is None or self._settle_ahead(version):
            return None
        # What is run is not what is published under its number: it is news, whatever the number.
        replaced = self._ahead is not None and version.step == self._ahead.step
        if not replaced and not is_new(current, self._known(current), version.pair):
            return None
        self._followed.keep(version.step, version.pair)
        return version.step

    def _settle_ahead(self, version: Version | None) -> bool:
        """Say whether a published version is what a broadcast has brought, or older; confirm it if it is that."""
        ahead = self._ahead
        if ahead is None or version is None:
            return False
        if version.step == ahead.step and is_same(ahead, version, self._attempt_of(version)):
            self._followed.keep(version.step, version.pair)
            self._apply(self._as("explorer", "confirm"), version.pair, version.digest)
            return True
        return is_overtaken(ahead, version.pair)

    def _apply(self, explorer: Member, pair: Pair | None, digest: str) -> None:
        info = {key: value for key, value in explorer.presence.info.items() if key != AHEAD}
        loading = explorer.presence.loading
        explorer.change(
            applied=pair, applied_digest=digest, info=info, loading=None if loading == pair else loading
        )
        self._ahead = None

    def _digest_of(self, pair: Pair | None) -> str:
        known = self._versions.get(pair[1]) if pair else None
        return known.digest if known is not None and known.pair == pair else ""

    def _attempt_of(self, version: Version) -> str:
        """Return the attempt of a published version, empty where its manifest is not the one published."""
        try:
            self.job.disk.refresh(self.job.root)
            manifest = read_manifest(self.job.disk, self.job.step(version.step))
        except (*MISSING, CorruptDataError):
            return ""
        return manifest.attempt if manifest.digest == version.digest else ""

    def _known(self, current: int) -> Pair | None:
        applied = self._member.presence.applied if self._member else None
        return applied if applied and applied[1] == current else self._followed.get(current)

    def _pair_of(self, version: int | Pair | Version) -> Pair:
        if isinstance(version, Version):
            return version.pair
        if isinstance(version, tuple):
            return version
        if version in self._followed:
            return self._followed[version]
        if version in self._versions:
            return self._versions[version].pair
        raise UsageError(f"step {version} was never offered to this explorer")

    def _has_directory(self, path: str, name: str) -> bool:
        entries = list_if_there(self.job.disk, path)
        return any(entry.name == name and entry.kind == "directory" for entry in entries)


def has_caught_up(version: Version | None, trainer: Presence) -> bool:
    """Say whether what is published is what a trainer had announced when it wrote its presence."""
    if trainer.step is None:
        return True
    if version is None:
        return False
    if version.held_marker == str(trainer.step):
        # A person went back from just that step, and it stays so until the trainer announces another one.
        return True
    digest = trainer.info.get("announced")
    return version.step == trainer.step and digest in (None, version.digest)
