"""What follows from the findings: how soon a host sees a new version, and which settings to use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncd.parts.doctor.probe import Finding
from syncd.parts.doctor.two_hosts import Peer
from syncd.protocol.mount import Mount

POLL = 0.25  # seconds between two ticks on a network mount: each is a few round trips to the server

_ATTRIBUTES = 60.0
_CIFS_ATTRIBUTES = 1.0
_GRACE = 15.0
_ASSUMED = (5.0, 50.0)
"""Milliseconds from a publish to what a tick finds, half and nearly all, where no peer has measured them."""

_COHERENT = ("lustre", "gpfs", "ocfs2", "gfs2", "wekafs")


@dataclass(frozen=True, slots=True)
class Expectation:
    wake: str  # `inotify` or `poll`
    latency_p50_ms: float  # half of all new versions are seen within this
    latency_p99_ms: float  # nearly all are
    poll: float  # recommended seconds between two ticks
    attribute_cache: float  # seconds for which this host may see old attributes
    trash_grace: float  # recommended seconds between moving a step to the trash and removing it
    advice: tuple[str, ...]  # mount options to consider, and why


def expectation(mount: Mount, findings: Sequence[Finding], peer: Peer | None) -> Expectation:
    woken = wakes(mount, findings, peer)
    one_way = (peer.slowest_p50_ms / 2, peer.slowest_p99_ms / 2) if peer else _ASSUMED
    poll = max(POLL, round(one_way[0] / 500, 2))
    cache = attribute_cache(mount)
    # Ticks come at equal intervals, a version at any time between two of them.
    latency = event_latency(findings) if woken else (poll * 500 + one_way[0], poll * 1000 + one_way[1])
    return Expectation(
        wake="inotify" if woken else "poll",
        latency_p50_ms=round(latency[0], 1),
        latency_p99_ms=round(latency[1], 1),
        poll=poll,
        attribute_cache=cache,
        trash_grace=cache + _GRACE,
        advice=tuple(_advice(mount, cache)),
    )


def wakes(mount: Mount, findings: Iterable[Finding], peer: Peer | None) -> bool:
    """Return whether a change made by whoever writes here raises an event on this host."""
    here = any(finding.name == "events" and finding.verdict == "ok" for finding in findings)
    return here and not mount.is_network and (peer is None or peer.inward.events)


def event_latency(findings: Iterable[Finding]) -> tuple[float, float]:
    """Return the usual and the slowest milliseconds until an event came."""
    figures = next(finding.figures for finding in findings if finding.name == "events")
    return figures["p50_ms"], figures["max_ms"]


def attribute_cache(mount: Mount) -> float:
    """Return for how many seconds this host may see an old attribute, or miss a new name."""
    if not mount.is_network or mount.type in _COHERENT or mount.option("noac") is not None:
        return 0.0
    stated = [seconds(mount.option(name)) for name in ("actimeo", "acregmax", "acdirmax")]
    if stated[0] is not None:
        return stated[0]
    default = _CIFS_ATTRIBUTES if mount.type in ("cifs", "smb3") else _ATTRIBUTES
    # The kernel lists only what differs from its default, so a maximum that is not there is the default.
    return max(default if value is None else value for value in stated[1:])


def seconds(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _advice(mount: Mount, cache: float) -> list[str]:
    if mount.option("noac") is not None:
        return ["noac can be removed: a tick asks the server by itself, and noac makes every other stat slow"]
    if not mount.type.startswith("nfs"):
        return []
    advice = ["noac is not needed: a tick lists and opens, which asks the server (close-to-open)"]
    if mount.option("lookupcache") is None:
        advice.append(
            "lookupcache=positive shows new names at once to programs that poll for them; syncd does not need it"
        )
    if cache > 10:  # noqa: PLR2004 - shorter is already chosen by someone
        advice.append(f"actimeo=3 would let trash_grace be {_GRACE + 3:g} s instead of {cache + _GRACE:g} s")
    if "vers=3" in mount.options and mount.option("local_lock") not in (None, "none"):
        advice.append("nolock: flock and lockf do not exclude other hosts; syncd uses neither")
    return advice
