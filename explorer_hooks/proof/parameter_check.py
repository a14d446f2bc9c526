"""Whether an engine's parameters changed with a version: its own checksums before and after a load, compared.

A probe does not tell two versions apart that differ by less than the noise between two correct implementations. An
engine that stayed where it was answers the probe of such a version well enough; its checksums show that it did.
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum

from explorer_hooks.hook import Checksums, ProbingHook
from explorer_hooks.proof.judgement import differences
from syncd.errors import SyncdError
from syncd.protocol.disk import Clock
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.probe import Probe
from syncd.protocol.safetensors import read_header
from syncd.safe_open import open_read
from syncd.transports.base import WeightDirectory

NEEDED_BELOW = 2.0
"""The difference of two versions' probes below which checksums are asked for, in multiples of the tolerance."""

SHARE = 20.0
"""How many times as long as they took the engine is left alone after it has computed checksums."""

QUICK = 0.05
"""Seconds that checksums may take without that."""

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes of parameters as safetensors and as torch name them."""


_PIECE = 1 << 20


class Moved(StrEnum):
    """What checksums say of a load.

    changed: in each replica a parameter has another checksum. unchanged: in one of them none has. hidden: in one of
    them none has that the engine shows, and it does not show all. not given: the engine gives none. not needed: the
    probe alone tells the two versions apart, or they are the same, or there is no version before. not asked: they
    took long, too short a time ago.
    """

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    HIDDEN = "hidden"
    NOT_GIVEN = "not given"
    NOT_NEEDED = "not needed"
    NOT_ASKED = "not asked"


def distance(probe: Probe, other: Probe) -> float:
    """Return the mean difference of two probes in nats, infinity if they are of different tokens."""
    if probe.tokens != other.tokens:
        return math.inf
    off = differences(probe.logprobs, other.logprobs)
    return math.fsum(off) / len(off)


def is_needed(old: WeightDirectory, new: WeightDirectory, allowed: float) -> bool:
    """Return whether checksums can show that an engine stayed where it was and a probe cannot (`allowed` in nats)."""
    if old.probe is None or new.probe is None or not old.shards or not new.shards:
        return False
    is_same = sorted(shard.digest for shard in old.shards) == sorted(shard.digest for shard in new.shards)
    return not is_same and distance(old.probe, new.probe) <= NEEDED_BELOW * allowed


def moved(before: Checksums, after: Checksums) -> Moved:
    still = stayed(before, after)
    if not still:
        return Moved.CHANGED
    return Moved.UNCHANGED if all(all(after[replica].values()) for replica in still) else Moved.HIDDEN


def is_cast(version: WeightDirectory, dtype: str | None) -> bool:
    """Return whether an engine holds a version's tensors in another dtype, so that small changes may vanish."""
    return any(DTYPES.get(tensor.dtype) != dtype for tensor in version.tensors.values())


class ParameterCheck:
    """Asks one engine for its checksums around each load for which they can show something."""

    def __init__(self, hook: ProbingHook, clock: Clock) -> None:
        self._hook, self._clock = hook, clock
        self._old: WeightDirectory | None = None
        self._before: Checksums | None = None
        self._kept: tuple[str, Checksums] | None = None
        """The checksums after the last load, with its label: those before the next one."""
        self._loading = ""
        self._leave_until = -math.inf
        self._skipped = Moved.NOT_NEEDED

    def begin(self, old: WeightDirectory | None, new: WeightDirectory, allowed: float) -> None:
        """Ask for the checksums before a load; `old` is None if what runs is not known, `allowed` is in nats."""
        kept, self._kept, self._before, self._old = self._kept, None, None, old
        self._loading = new.label
        if old is None or not is_needed(old, new, allowed):
            self._skipped = Moved.NOT_NEEDED
        elif self._clock.monotonic() < self._leave_until:
            self._skipped = Moved.NOT_ASKED
        else:
            self._skipped = Moved.NOT_GIVEN
            self._before = kept[1] if kept and kept[0] == old.label else self._ask()

    def end(self, new: WeightDirectory) -> tuple[Moved | None, str]:
        """Ask again after the load; return what the checksums say and why they show that it was not loaded.

        They say None if this version was not loaded just now; the reason is empty if they do not show that.
        """
        loading, self._loading = self._loading, ""
        if loading != new.label:
            return None, ""
        if self._old is None or self._before is None or (after := self._ask()) is None:
            return self._skipped, ""
        self._kept = new.label, after
        movement, before, self._before = moved(self._before, after), self._before, None
        if movement is not Moved.UNCHANGED or is_cast(new, self._hook.dtype()):
            return movement, ""
        changed = first_difference(self._old, new)
        still = ", ".join(stayed(before, after))
        return movement, f"{changed} has changed, and no parameter of {still} has" if changed else ""

    def _ask(self) -> Checksums | None:
        begun = self._clock.monotonic()
        checksums = self._hook.checksums()
        ended = self._clock.monotonic()
        if ended - begun > QUICK:
            self._leave_until = ended + SHARE * (ended - begun)
        return checksums


def stayed(before: Checksums, after: Checksums) -> list[str]:
    return [
        replica
        for replica, checksums in after.items()
        if not _has_changed(before.get(replica, {}), checksums)
    ]


def first_difference(old: WeightDirectory, new: WeightDirectory) -> str:
    """Return the first tensor whose bytes differ in two versions, empty if none does or files cannot be read."""
    try:
        places = [_places(version) for version in (old, new)]
        common = (name for name in places[1] if name in places[0])
        return next((name for name in common if _differ(places[0][name], places[1][name])), "")
    except (OSError, SyncdError):
        return ""


def _places(version: WeightDirectory) -> dict[str, tuple[str, int, int]]:
    """Return file, offset and size of each tensor."""
    places = {}
    for shard in version.shards:
        path = f"{version.path}/{shard.name}"
        header = read_header(LocalDisk(), path)
        for tensor in header.tensors.values():
            places[tensor.name] = (path, header.data_offset + tensor.start, tensor.end - tensor.start)
    return places


def _differ(extent: tuple[str, int, int], other: tuple[str, int, int]) -> bool:
    if extent[2] != other[2]:
        return True
    pairs = zip(_pieces(*extent), _pieces(*other), strict=True)
    return any(piece != another for piece, another in pairs)


def _pieces(path: str, offset: int, size: int) -> Iterator[bytes]:
    with open(open_read(path), "rb") as file:
        file.seek(offset)
        for at in range(0, size, _PIECE):
            yield file.read(min(_PIECE, size - at))


def _has_changed(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    return any(checksum != before.get(parameter) for parameter, checksum in after.items())
