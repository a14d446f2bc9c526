"""Receives versions from the job directory: by the host's stage, made of deltas, or as changes. Imports no torch."""

import contextlib
import os
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from syncd.errors import ConfigError, CorruptDataError, RefusedError
from syncd.extras import install_command, missing_packages
from syncd.protocol.layout import ACTOR
from syncd.protocol.lineage import ancestors, materialise_hint
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import Manifest, read_manifest, uri_problem
from syncd.protocol.presence import READS_DELTA
from syncd.protocol.version import Version
from syncd.transports.base import StoredChanges, WeightDirectory
from syncd.transports.files.copy_files import check_copy
from syncd.transports.files.leased_directory import (
    DirectoryOptions,
    DirectoryReceiver,
    HeldDirectory,
    LoadTimings,
    PayloadFiles,
    payload_of,
)
from syncd.transports.files.piece_reader import ORIGIN, PieceReader
from syncd.transports.files.stage import (
    HostStage,
    StagedCopy,
    StageFullError,
    StageSource,
    open_scratch,
    sweep_scratch,
)
from syncd.transports.tensors import list_tensors, read_tensors

if TYPE_CHECKING:
    from syncd.client.client import Client
    from syncd.client.follow import Leased

_DELTA_SOURCE = "syncd.transports.delta.source:DeltaSource"
"""Imported when the first delta is staged: it needs the extra `delta`."""

_PEERS = "peers"  # the source of bytes that other hosts gave


class FilesReceiver(DirectoryReceiver):
    """Receives versions from the job directory through this host's stage, for which `reader` gets the bytes.

    Without a stage it loads from the job directory, and deltas from a directory below TMPDIR.
    """

    name = "checkpoint"

    def __init__(
        self,
        client: "Client",
        options: DirectoryOptions | None = None,
        stage: HostStage | None = None,
        reader: PieceReader = ORIGIN,
    ) -> None:
        super().__init__(client, options)
        self._stage, self._reader = stage, reader
        self._scratch: HostStage | None = None
        self._is_full = False
        self._came_from = ""
        self._hook_checks = False
        self._unchecked: StageSource | None = None
        """How the copy was got that the hook is to hash."""
        self._missing_for_deltas = missing_packages("delta")
        self._has_warned = False
        if stage is None:
            sweep_scratch(client.job.root, client.clock)

    def reads(self) -> tuple[str, ...]:
        """Return what can be received at no cost beside steps that are stored whole."""
        has_room = self._options.changes if self._stage is None else not self._is_full
        if not has_room or "weights" not in self._options.kinds:
            return ()
        if self._missing_for_deltas:
            self._warn()
            return ()
        return (READS_DELTA,)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            reason = f"not installed: {', '.join(self._missing_for_deltas)}"
            self._options.report("warning", "deltas_disabled", reason=reason, hint=install_command("delta"))

    def sweep(self) -> None:
        for stage in (self._stage, self._scratch):
            if stage is not None:
                stage.sweep()

    def close(self) -> None:
        super().close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()

    def begin(self, *, hook_checks: bool) -> None:
        """Forget what was found last; with `hook_checks` the hook hashes a staged copy while it loads it."""
        self._hook_checks, self._unchecked = hook_checks, None

    def reject(self) -> bool:
        """Return whether the staged copy that was found last is damaged; it is removed, and can be made again."""
        source, self._unchecked = self._unchecked, None
        if source is None or self._stage is None:
            return False
        copy = self._stage.find_whole(source, self._options.stop, self._options.report)
        if copy is not None:
            copy.close()
        return copy is None

    def find_unchecked(self, leased: "Leased") -> HeldDirectory:
        """Return the directory of a version that an engine runs already; its content is checked when it is used."""
        version, manifest = leased.version, leased.manifest
        if manifest is None or version.kind in {"delta", "remote"}:
            return self._find(leased, LoadTimings(self._client.clock))
        payload = payload_of(manifest)
        source = self._stage_source(leased, payload, self._stage)
        staged = self._stage.find(source) if self._stage else None
        if staged is not None:
            return self._held_copy(version, staged, payload, verified=False)
        tensors = read_tensors(self._disk, leased.path, payload.shards)
        directory = payload.directory(version, leased.path, tensors)
        check = self._content_check(self._disk, leased.path, payload, lambda: False)
        return HeldDirectory(directory, "files", payload.size, check=check)

    def _find(self, leased: "Leased", timings: LoadTimings) -> HeldDirectory:
        version, kinds = self._loadable(leased), self._options.kinds
        if version.kind == "delta" and "weights" in kinds:
            return self._find_delta(leased, timings)
        if version.kind not in kinds:
            able = ", ".join(sorted(kinds))
            message = f"step {version.step} is of kind {version.kind}; this hook loads {able}"
            raise RefusedError(message, path=leased.path)
        if leased.version.kind == "remote" and (problem := uri_problem(leased.version.path)):
            raise RefusedError(f"step {version.step} cannot be loaded: {problem}")
        if version.kind == "remote":
            probe = payload_of(leased.manifest).probe
            return HeldDirectory(WeightDirectory(version, leased.path, probe=probe))
        if leased.manifest is None or version is not leased.version:
            return self._find_foreign(leased, version, timings)
        with timings.part("verify"):
            self._require_sizes(leased, leased.manifest)
        return self._find_native(leased, payload_of(leased.manifest), timings)

    def _find_foreign(self, leased: "Leased", version: Version, timings: LoadTimings) -> HeldDirectory:
        with timings.part("verify"):
            tensors = list_tensors(self._disk, version, leased.path, self._options.kinds)
        if version is not leased.version:
            # A start model's dtypes are not compared: it often has wider ones than the versions trained from it.
            tensors = {}
        probe = payload_of(leased.manifest).probe
        return HeldDirectory(WeightDirectory(version, leased.path, (), tensors, probe=probe))

    def _find_native(self, leased: "Leased", payload: PayloadFiles, timings: LoadTimings) -> HeldDirectory:
        staged = self._staged(self._stage_source(leased, payload, self._stage), timings)
        with timings.part("verify"):
            if staged is not None:
                return self._held_copy(leased.version, staged, payload, verified=staged.is_checked)
            checked = self._checked(leased.version, self._disk, leased.path, payload)
        manifest = leased.manifest
        if self._options.changes and manifest and manifest.shortcut and not self._missing_for_deltas:
            checked = replace(checked, changes=StoredChanges(self._client.job, (manifest,)))
        return HeldDirectory(checked, "files", payload.size)

    def _find_delta(self, leased: "Leased", timings: LoadTimings) -> HeldDirectory:
        """Return a delta as the directory of a full save, in the stage or below TMPDIR; or as changes."""
        manifest = leased.manifest
        if manifest is None or self._missing_for_deltas:
            message = f"step {leased.version.step} is a delta, and numpy or pyarrow is not installed"
            raise RefusedError(message, path=leased.path, hint=install_command("delta"))
        self._require_sizes(leased, manifest)
        payload, version = payload_of(manifest), replace(leased.version, kind="weights")
        try:
            if self._stage is None and self._options.changes:
                return self._find_changes(leased, manifest, timings)
            with timings.part("stage"):
                staged = self._made_whole(leased, payload)
        except CorruptDataError:
            read_manifest(self._disk, self._client.job.step(version.step))  # removed: that is why
            raise
        with timings.part("verify"):
            return self._held_copy(version, staged, payload, verified=staged.is_checked)

    def _find_changes(self, leased: "Leased", manifest: Manifest, timings: LoadTimings) -> HeldDirectory:
        """Return a delta without its files, for a hook that takes changes; its links stay leased with it."""
        job, payload = self._client.job, payload_of(manifest)
        with timings.part("verify"), contextlib.ExitStack() as links:
            manifests = manifest, *ancestors(job, manifest)
            links.enter_context(self._client.lease_links(manifests[1:]))
            tensors = read_tensors(self._disk, f"{job.step(manifests[-1].step)}/{ACTOR}", payload.shards)
            version, changes = replace(leased.version, kind="weights"), StoredChanges(job, manifests)
            directory = payload.directory(version, leased.path, tensors, changes=changes)
            return HeldDirectory(directory, "files", payload.size, links.pop_all().close)

    def _made_whole(self, leased: "Leased", payload: PayloadFiles) -> StagedCopy:
        if self._stage is not None:
            return self._stage_copy(self._stage, self._stage_source(leased, payload, self._stage))
        job, step = self._client.job, leased.version.step
        try:
            self._scratch = self._scratch or open_scratch(job.root, self._client.clock)
            return self._scratch.provide(
                self._stage_source(leased, payload, self._scratch), self._options.stop, self._options.report
            )
        except (StageFullError, ConfigError) as error:
            message = f"step {step} is a delta, and cannot be rebuilt without a stage: {error.message}"
            hint = f"follow with --stage DIR (explorer run: explorer.follow.stage), or {materialise_hint(job, step)}"
            raise RefusedError(message, path=error.path, hint=hint) from error

    def _held_copy(
        self, version: Version, staged: StagedCopy, payload: PayloadFiles, *, verified: bool
    ) -> HeldDirectory:
        """Return a staged copy as a version that hooks load; unless `verified`, it is hashed when it is used."""
        with contextlib.ExitStack() as undo:
            undo.callback(staged.close)
            tensors = read_tensors(LocalDisk(), staged.path, payload.shards)
            undo.pop_all()
        directory = payload.directory(version, staged.path, tensors, verified=verified)
        check = partial(check_copy, staged.path, payload.records, lambda: False)
        came_from = self._came_from if verified else ""
        return HeldDirectory(directory, "stage", payload.size, staged.close, check=check, read_from=came_from)

    def _loadable(self, leased: "Leased") -> Version:
        """Return the version as hooks get it.

        A remote version whose path is a directory here, such as the model that a run began with, is of kind weights
        for hooks that do not load remote ones.
        """
        version, kinds = leased.version, self._options.kinds
        is_directory = version.kind == "remote" and os.path.isabs(leased.path) and os.path.isdir(leased.path)
        if is_directory and "remote" not in kinds and "weights" in kinds:
            return replace(version, kind="weights", layout="huggingface")
        return version

    def _stage_source(self, leased: "Leased", payload: PayloadFiles, stage: HostStage | None) -> StageSource:
        """Return how the stage gets a version: as changes of a copy that it has, or by copying the files."""
        manifest, report = leased.manifest, self._options.report
        reader = self._reader if stage is self._stage else ORIGIN
        source_files = self._disk, leased.version, leased.path, payload.records
        if manifest is None or manifest.changes is None or stage is None or self._missing_for_deltas:
            return StageSource(*source_files, reader=reader)
        source: StageSource = resolve_name(_DELTA_SOURCE)(
            *source_files, self._client, manifest, stage, report, reader=reader
        )
        return source

    def _staged(self, source: StageSource, timings: LoadTimings) -> StagedCopy | None:
        if self._stage is None:
            return None
        with timings.part("stage"):
            try:
                return self._stage_copy(self._stage, source)
            except StageFullError as error:
                self._options.report("warning", "stage_write_failed", reason=str(error), hint=error.hint)
                return None

    def _stage_copy(self, stage: HostStage, source: StageSource) -> StagedCopy:
        before, options = self._reader.bytes_by_source().get(_PEERS, 0), self._options
        try:
            staged = stage.provide(source, options.stop, options.report, check=not self._hook_checks)
        except StageFullError:
            self._is_full = True
            raise
        self._is_full, self._unchecked = False, None if staged.is_checked else source
        self._came_from = _PEERS if self._reader.bytes_by_source().get(_PEERS, 0) > before else ""
        return staged
