"""One iteration of a mirror: read the source's version, copy one step of the way to it, publish what is whole."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncd.errors import TryAgainError
from syncd.observe import event_names
from syncd.parts.mirror.decisions import choose_way, lag
from syncd.parts.mirror.ends import SourceEnd, TargetEnd
from syncd.parts.mirror.links import Link, Way, find_way
from syncd.protocol.disk import Clock
from syncd.protocol.job_end import LastVersion
from syncd.protocol.mirror_report import MirrorReport
from syncd.protocol.version import Pair, Version, label_of

END_EVERY = 1.0  # seconds between two looks at the end of the source's job


class Mirror:
    """Copies the versions of a source to a target.

    `about` names the two ends as they were given. `tell` hears events: level, name, and fields as keywords.
    """

    def __init__(
        self,
        source: SourceEnd,
        target: TargetEnd,
        clock: Clock,
        about: MirrorReport,
        tell: Callable[..., None],
    ) -> None:
        self._source, self._target, self._clock, self._tell = source, target, clock, tell
        self._report = about
        self._begun: Way | None = None
        self._seen: tuple[Pair, float] | None = None
        self._last_version = LastVersion()
        self._looks_at, self._has_baseline = float("-inf"), False

    def turn(self) -> bool:
        """Do one thing; return whether there was something to do."""
        if not self._target.is_ready():
            self._show_lag("standby", 0, 0)
            return False
        newest, published = self._source.newest(), self._target.published()
        if newest is None or (published is not None and newest.pair <= published):
            self._finish(newest, published)
            return False
        if self._seen is None or self._seen[0] != newest.pair:
            self._seen = newest.pair, self._clock.monotonic()
        if self._begun is not None and published is not None and self._begun.version.pair <= published:
            self._begun = None
        way = self._way(newest)
        self._show_lag("copying", lag(published, newest.pair), way.left)
        self._begun = way
        self._advance(way)
        return True

    def show(self, **changes: Any) -> None:
        """Show at both ends how far the mirror is."""
        if changes.get("state", "failing") != "failing":
            changes.setdefault("detail", "")
        if changes.get("state") not in (None, self._report.state):
            changes["since"] = round(self._clock.time(), 3)
        report = replace(self._report, **changes)
        if report != self._report:
            self._report = report
            self._source.report(report)
            self._target.report(report)

    def _finish(self, newest: Version | None, published: Pair | None) -> None:
        """Release what was held; refuse a source that is behind what it was."""
        self._begun = None
        self._source.hold(())
        self._target.hold(())
        if newest and published and newest.pair < published:
            raise TryAgainError(
                f"the source is at {label_of(newest.pair)}, below {label_of(published)} at the target: "
                "its versions began anew",
                hint="mirror it into another directory or prefix",
            )
        pair = dict(zip(("generation", "step"), published or (None, None), strict=True))
        self._show_lag("current", 0, 0, **pair)
        if published is not None and self._clock.monotonic() >= self._looks_at:
            self._pass_end(published)

    def _pass_end(self, published: Pair) -> None:
        """Have the job at the target end once its last version is there, and go on if the source's does."""
        now = self._clock.monotonic()
        self._looks_at, end = now + END_EVERY, self._source.end()
        has_come = self._last_version.has_come(end, published, now)
        if (end is None or has_come) and end != self._target.end():
            self._target.finish(end)

    def _pass_baseline(self) -> None:
        """Have the target know the baseline, which engines there answer before they load a version."""
        if not self._has_baseline and (data := self._source.baseline()) is not None:
            self._target.keep_baseline(data)
            self._has_baseline = True

    def _way(self, newest: Version) -> Way:
        begun = None
        if self._begun is not None:
            with contextlib.suppress(TryAgainError):  # its steps were removed: nobody will read it
                begun = self._find(self._begun.version)
        return choose_way(self._find(newest), begun)

    def _find(self, version: Version) -> Way:
        return find_way(version, self._target.has, self._source.link, self._target.is_sealed)

    def _advance(self, way: Way) -> None:
        self._source.hold(way.steps)
        if self._target.make_way(way.version, way.links, self._source):
            return
        self._target.hold([*way.steps, *([way.base] if way.base is not None else [])])
        self._check_held(way)
        if (link := self._unsealed(way)) is not None:
            self._copy(link)
            way = self._begun = self._find(way.version)
        # Nothing is left of it, so no newer version would be chosen: the source need not be asked again.
        if self._unsealed(way) is None:
            self._publish(way)
            self._begun = None

    def _unsealed(self, way: Way) -> Link | None:
        return next((link for link in way.links if not self._target.is_sealed(link)), None)

    def _check_held(self, way: Way) -> None:
        """Look again at what is held now: it may have gone between the first reading and the lease."""
        for link in way.links:
            if self._source.link(link.step, link.manifest.digest) is None:
                raise TryAgainError(f"step {link.step} of the source was removed meanwhile")

    def _copy(self, link: Link) -> None:
        begin = self._clock.monotonic()
        sent = self._target.copy(link, self._source)
        self._tell(
            event_names.MIRROR_STEP_COPIED,
            "info",
            step=link.step,
            kind=link.manifest.kind,
            bytes=link.manifest.size,
            sent=sent,
            seconds=round(self._clock.monotonic() - begin, 6),
        )

    def _publish(self, way: Way) -> None:
        version = way.version
        self._pass_baseline()
        self._target.publish(version, way.links)
        since = self._seen[1] if self._seen and self._seen[0] == version.pair else None
        seconds = None if since is None else round(self._clock.monotonic() - since, 6)
        self._tell(
            event_names.MIRROR_VERSION_PUBLISHED,
            "info",
            generation=version.generation,
            step=version.step,
            seconds=seconds,
        )
        self.show(generation=version.generation, step=version.step)
        self._target.tidy()

    def _show_lag(self, state: str, behind: int, left: int, **pair: int | None) -> None:
        if (behind, left) != (self._report.behind, self._report.left):
            self._tell(event_names.MIRROR_LAG_CHANGED, "debug", behind=behind, bytes=left)
        self.show(state=state, behind=behind, left=left, **pair)
