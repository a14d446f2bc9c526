"""Who may load which version now: `admit(fleet, policy, before, now) -> Wave`, pure.

A wave has two versions. Only canaries load the candidate, the newest published version when its test began. All
others load the approved version, the newest one that enough canaries have shown to run: at most `max_paused` units at
once, those that are furthest behind first. So nobody loads what no canary has shown to be good, and a newer version
need not wait until the one before it has reached everybody.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from syncd.protocol.rolling import CANARY, IDLE, ROLLING, STOPPED, Admission, StoppedVersion, Wave
from syncd.protocol.version import GoodVersion, Pair

SETTLE = 10.0
"""Seconds for which a withdrawn admission keeps its slot: its explorer may have read the file before, and go on."""

MOST_STOPPED = 16
"""Stopped versions that the wave remembers, the newest ones; one that engines run or may be given stays."""

MOST_WAITING = 64  # explorers that the wave names as waiting, or as not waiting for it

MOST_ADMITTED = 1024
"""Explorers that hold an admission at once: followers read no larger document than 1 MiB."""

AT_LEAST_LOST = 2
"""Engines that must have ended in a test for that to stop the version: one may have ended for any reason."""

Key = tuple[int, str]  # (step, digest): the content of a version
GivenUpKey = tuple[int | None, int, str]  # the generation, None if the follower does not say it, with that


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator sets; `options.py` has the meaning of each."""

    max_paused: int | float = 1  # units, or a share of them
    canaries: int = 1
    wrong: int = 1
    patience: float = 600.0
    unit: str = "engine"
    rollback_paused: int | float | None = None

    def limit(self, units: int, *, goes_back: bool) -> int:
        """Return how many units of all may pause at once, at least one."""
        most = self.rollback_paused if goes_back and self.rollback_paused is not None else self.max_paused
        return max(int(most * units + 1e-9), 1) if isinstance(most, float) else most


@dataclass(frozen=True, slots=True)
class Engine:
    """What a living explorer's presence says."""

    name: str
    unit: str
    applied: Pair | None = None  # what it runs
    is_proven: bool = False  # whether it has proven that
    serves: bool = False  # whether it has work to lose: it runs a version, and answers
    paused_for: Pair | None = None  # what it loads now
    gave_up: Mapping[GivenUpKey, str] = field(default_factory=dict)  # why, by version
    waits: bool = True  # whether it waits for the wave
    incarnation: str = ""  # of its explorer's process

    def runs(self, version: GoodVersion) -> bool:
        return self.applied == version.pair and self.serves

    def has_given_up(self, version: GoodVersion | Admission) -> bool:
        return self.why_not(version) is not None

    def why_not(self, version: GoodVersion | Admission) -> str | None:
        """Return why it gave a version up: the same step of another generation is tried again."""
        keys = ((generation, version.step, version.digest) for generation in (version.generation, None))
        return next((self.gave_up[key] for key in keys if key in self.gave_up), None)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the daemon's snapshot says."""

    engines: tuple[Engine, ...] = ()  # those that live
    published: GoodVersion | None = None
    last_good: GoodVersion | None = (
        None  # the newest version that an engine has shown to run, by the version file
    )
    by_rollback: bool = False  # whether an operator went back to what is published
    readable: frozenset[Key] = frozenset()  # the steps that are complete and not in quarantine
    ended: tuple[Engine, ...] = ()  # what explorers said last that have stopped or died

    def can_read(self, version: GoodVersion) -> bool:
        return (version.step, version.digest) in self.readable


def admit(fleet: Fleet, policy: Policy, before: Wave, now: float, *, chooses: bool = True) -> Wave:
    """Return the wave of now, given the one before; the seconds of both are of one clock.

    Unless it `chooses`, a version that nobody tests yet does not get its canaries now.
    """
    test = _Test(fleet, policy, before, now)
    units = {engine.unit for engine in fleet.engines}
    wave = replace(
        before,
        candidate=test.candidate,
        approved=test.approved,
        by_word=test.approved is not None and _is_by_word(fleet, test.approved),
        stopped=test.stopped,
        lost=test.lost if test.candidate == before.candidate else (),
        old=tuple(engine.name for engine in fleet.engines if not engine.waits)[:MOST_WAITING],
        limit=policy.limit(len(units), goes_back=test.is_vouched_for and test.approved == fleet.published),
        unit=policy.unit,
        patience=policy.patience,
    )
    return _Slots(fleet, wave, before, now).fill(test.canaries(chooses=chooses))


# --- which versions -------------------------------------------------------------------------------------------------


class _Test:
    """Which version is in test, what has passed, and what was stopped."""

    def __init__(self, fleet: Fleet, policy: Policy, before: Wave, now: float) -> None:
        self._fleet, self._policy, self._before, self._now = fleet, policy, before, now
        self.lost = _lost(fleet, before)
        self.stopped = self._stopped()
        self._pairs = frozenset(version.pair for version in self.stopped)
        self.is_vouched_for = self._is_vouched_for()
        self.candidate = self._candidate()
        self.approved = self._approved()

    def canaries(self, *, chooses: bool) -> list[Engine]:
        """Return who tests the candidate: first who runs it or was admitted to it, so that the choice stays."""
        candidate = self.candidate
        if candidate is None or candidate == self.approved:
            return []
        slots = self._before.admitted
        chosen = {name for name, slot in slots.items() if slot.pair == candidate.pair}
        if not chosen and not chooses:
            return []
        chosen |= {engine.name for engine in self._fleet.engines if engine.paused_for == candidate.pair}
        able = [engine for engine in self._fleet.engines if self._can_test(engine, candidate)]
        able.sort(
            key=lambda engine: (engine.applied != candidate.pair, engine.name not in chosen, _doubts(engine))
        )
        return able[: self._policy.canaries]

    def _stopped(self) -> tuple[StoppedVersion, ...]:
        """Return the stopped versions, with those in test that too many engines have given up or ended over."""
        stopped = self._before.stopped
        stopped_pairs = {version.pair for version in stopped}
        for version in filter(None, (self._before.candidate, self._fleet.published)):
            reason = self._why_stopped(version)
            if reason and version.pair not in stopped_pairs and not self._has_passed(version):
                stopped = (*stopped, StoppedVersion(*version.pair, version.digest, reason))
                stopped_pairs.add(version.pair)
        return self._remembered(sorted(stopped, key=lambda version: version.pair))

    def _why_stopped(self, version: GoodVersion) -> str:
        """Return why a version must be stopped, empty if it need not: `wrong` engines gave it up, or two ended."""
        reasons = _against(self._fleet, version)
        lost = len(self.lost) if version == self._before.candidate else 0
        if reasons and len(reasons) >= self._policy.wrong:
            return f"{_counted(len(reasons))} gave it up: {reasons[0]}"
        if lost and len(reasons) + lost >= max(self._policy.wrong, AT_LEAST_LOST):
            return f"{_counted(len(reasons) + lost)} gave it up or ended while loading it"
        return ""

    def _remembered(self, stopped: list[StoppedVersion]) -> tuple[StoppedVersion, ...]:
        """Return the newest stopped versions, and of the others those that engines run or would be given again."""
        named = {version.pair for version in (self._fleet.last_good, self._fleet.published) if version}
        named |= {engine.applied for engine in self._fleet.engines if engine.applied}
        older, newest = stopped[:-MOST_STOPPED], stopped[-MOST_STOPPED:]
        return (*(version for version in older if version.pair in named), *newest)

    def _has_passed(self, version: GoodVersion) -> bool:
        """Return whether canaries have shown it to be good: then an engine that gives it up is itself at fault."""
        if not self._policy.canaries:
            return False
        is_vouched = self._fleet.by_rollback and version == self._fleet.published
        is_approved = version == self._before.approved and not is_vouched
        return is_approved or _shown(self._fleet, version) >= self._policy.canaries

    def _is_vouched_for(self) -> bool:
        """Return whether an operator vouches for what is published: not for one that canaries have stopped before."""
        published = self._fleet.published
        if published is None or not self._fleet.by_rollback:
            return False
        key = (published.step, published.digest)
        return all((version.step, version.digest) != key for version in self.stopped)

    def _candidate(self) -> GoodVersion | None:
        """Return the version in test: the one of before until its test has ended, else what is published."""
        tested, newest = self._before.candidate, self._fleet.published
        if tested is not None and newest is not None and self._is_in_test(tested, newest):
            return tested
        can_be = newest is not None and newest.pair not in self._pairs and self._fleet.can_read(newest)
        return newest if can_be else None

    def _is_in_test(self, tested: GoodVersion, newest: GoodVersion) -> bool:
        """Return whether canaries still test an older version than the published one, which then waits for them."""
        is_older = tested.generation == newest.generation and tested.pair < newest.pair
        if not is_older or tested.pair in self._pairs or tested == self._before.approved:
            return False
        if self._policy.canaries == 0 or not self._fleet.can_read(tested):
            return False
        testing = {name for name, slot in self._before.admitted.items() if slot.pair == tested.pair}
        able = {engine.name for engine in self._fleet.engines if self._can_test(engine, tested)}
        shown = _shown(self._fleet, tested)
        return shown < self._needed(tested) and bool(shown or testing & able)

    def _can_test(self, engine: Engine, version: GoodVersion) -> bool:
        """Return whether an engine runs a version, or may: it has not given it up, and no load of it hangs."""
        if engine.applied == version.pair:
            return engine.serves
        slot = self._before.admitted.get(engine.name)
        is_late = slot is not None and self._now - slot.since >= self._policy.patience
        is_lost = engine.name in self.lost and version == self._before.candidate
        return engine.waits and not is_late and not is_lost and not engine.has_given_up(version)

    def _needed(self, version: GoodVersion) -> int:
        """Return how many canaries must run a version: all engines, where there are fewer that can."""
        can = sum(self._can_test(engine, version) for engine in self._fleet.engines)
        return max(min(self._policy.canaries, can), 1)

    def _approved(self) -> GoodVersion | None:
        """Return what all may load: the newest version that has passed its test, else that of before.

        The version that was in test counts, too: a newer one takes its place as candidate once its test has ended.
        """
        approved = self._kept()
        for tested in (self._before.candidate, self.candidate):
            is_newer = tested is not None and (approved is None or tested.pair > approved.pair)
            if tested is not None and is_newer and self._passes(tested):
                approved = tested
        return approved

    def _passes(self, tested: GoodVersion) -> bool:
        """Return whether enough canaries run a version, or it needs none."""
        published = self._fleet.published
        if published is None or tested.generation != published.generation or tested.pair in self._pairs:
            return False
        if not self._fleet.can_read(tested):
            return False
        is_vouched = self._policy.canaries == 0 or (self.is_vouched_for and tested == published)
        return is_vouched or _shown(self._fleet, tested) >= self._needed(tested)

    def _kept(self) -> GoodVersion | None:
        """Return what was approved before while engines may still be given it, else the last good version."""
        approved, fleet = self._before.approved, self._fleet
        if approved is not None and approved.pair not in self._pairs and fleet.can_read(approved):
            # Of another generation only what the daemon knows as good is not abandoned.
            is_of_now = fleet.published is not None and approved.generation == fleet.published.generation
            if is_of_now or approved == fleet.last_good:
                return approved
        good = fleet.last_good
        return good if good is not None and good.pair not in self._pairs else None


def _against(fleet: Fleet, version: GoodVersion) -> list[str]:
    """Return why engines have given a version up that they do not serve, those that ended over it too."""
    reasons = [engine.why_not(version) for engine in fleet.engines if not engine.runs(version)]
    reasons += [engine.why_not(version) for engine in fleet.ended]
    return [reason for reason in reasons if reason is not None]


def _lost(fleet: Fleet, before: Wave) -> tuple[str, ...]:
    """Return the explorers that ended, with their engine, while they held a slot for the version in test.

    One that is there again counts until its engine runs the version.
    """
    candidate, living = before.candidate, {engine.name: engine for engine in fleet.engines}
    if candidate is None:
        return ()
    died = {engine.name for engine in fleet.ended if engine.paused_for == candidate.pair}
    slots = {name: slot for name, slot in before.admitted.items() if slot.pair == candidate.pair}
    ended = {name for name, slot in slots.items() if _has_ended(living.get(name), slot, is_dead=name in died)}
    names = sorted({*before.lost, *ended})
    return tuple(name for name in names if name not in living or not living[name].serves)


def _has_ended(engine: Engine | None, slot: Admission, *, is_dead: bool) -> bool:
    """Return whether the holder of a slot died in its load, or is another process whose engine runs nothing."""
    if engine is None:
        return is_dead
    return bool(slot.incarnation) and engine.incarnation != slot.incarnation and not engine.serves


def _counted(engines: int) -> str:
    return f"{engines} engine" if engines == 1 else f"{engines} engines"


def _shown(fleet: Fleet, version: GoodVersion) -> int:
    """Return how many engines run a version, each after a proof where there was something to prove it by."""
    return sum(engine.runs(version) for engine in fleet.engines)


def _is_by_word(fleet: Fleet, version: GoodVersion) -> bool:
    running = [engine for engine in fleet.engines if engine.applied == version.pair]
    return bool(running) and not any(engine.is_proven for engine in running)


def _doubts(engine: Engine) -> tuple[bool, int, str]:
    """Return what makes an engine a worse canary.

    One that has not proven what it runs may be able to prove nothing, and versions that it has given up may have been
    its own fault.
    """
    return not engine.is_proven, len(engine.gave_up), engine.name


# --- who gets a slot ------------------------------------------------------------------------------------------------


class _Slots:
    """Fills the slots of a wave: first those that are taken, then by turn."""

    def __init__(self, fleet: Fleet, wave: Wave, before: Wave, now: float) -> None:
        self._fleet, self._wave, self._before, self._now = fleet, wave, before, now
        self._by_name = {engine.name: engine for engine in fleet.engines}
        self._admitted: dict[str, Admission] = {}
        self._leaving: dict[str, float] = {}

    def fill(self, canaries: list[Engine]) -> Wave:
        wanted = dict(self._wanted(canaries))
        self._keep()
        taken = self._taken_units()
        waiting = []
        for name, version in wanted.items():
            engine = self._by_name[name]
            if name in self._admitted or self._needs_no_slot(engine, version):
                continue
            # Where more are taken than may be, a unit that is among them gets no further slot either.
            is_taken = engine.serves and len(taken | {engine.unit}) > self._wave.limit
            if is_taken or len(self._admitted) >= MOST_ADMITTED:
                waiting.append(name)
                continue
            self._admitted[name] = Admission(
                *version.pair, version.digest, self._now, not engine.serves, engine.incarnation
            )
            if engine.serves:
                taken.add(engine.unit)
        waiting += self._waits_for_canaries(wanted)
        return replace(
            self._wave,
            admitted=dict(sorted(self._admitted.items())),
            leaving=dict(sorted(self._leaving.items())),
            waiting=tuple(waiting[:MOST_WAITING]),
            phase=self._phase(wanted),
            why=self._why(waiting, wanted, taken),
        )

    def _wanted(self, canaries: list[Engine]) -> Iterator[tuple[str, GoodVersion]]:
        """Yield who should load what, in order: canaries before the others, whoever is furthest behind first."""
        wave, chosen = self._wave, {engine.name for engine in canaries}
        versions = {True: wave.candidate, False: wave.approved}
        order = sorted(
            (engine for engine in self._fleet.engines if engine.waits),
            key=lambda engine: (engine.name not in chosen, engine.applied or (-1, -1), engine.name),
        )
        for engine in order:
            version = versions[engine.name in chosen]
            if version is not None and self._wants(engine, version):
                yield engine.name, version

    def _wants(self, engine: Engine, version: GoodVersion) -> bool:
        if engine.applied == version.pair or engine.has_given_up(version):
            return False
        # A canary that runs what it has tested is ahead of the others, and stays there unless it was stopped.
        is_ahead = engine.applied is not None and engine.applied > version.pair
        return not is_ahead or engine.applied in self._wave.stopped_pairs

    def _needs_no_slot(self, engine: Engine, version: GoodVersion) -> bool:
        """Return whether its follower goes on by itself: it runs no version, and this one is approved."""
        return engine.applied is None and version == self._wave.approved

    def _keep(self) -> None:
        """Keep the slots that are taken: each until its holder runs the version or gave it up.

        A slot is never given another version: its holder may have read either. One whose holder is dead is withdrawn,
        since a follower that was silent for long may be there again, and read of its admission before it ends. So is
        one whose holder gave the version up: its follower may start again, forget that, and read of it too.
        """
        for name, slot in self._before.admitted.items():
            engine = self._by_name.get(name)
            held = self._still_held(engine, slot) if engine is not None else None
            if held is not None:
                self._admitted[name] = held
            elif not slot.free and (engine is None or self._is_withdrawn(engine, slot)):
                self._leaving[name] = self._now  # a free one holds only while its engine has no work to lose
        # Whoever has paused holds a slot, admitted or not: it may have gone on while nobody led.
        for engine in self._fleet.engines:
            if engine.paused_for is None or engine.name in self._admitted:
                continue
            slot = Admission(*engine.paused_for, "", self._now, not engine.serves, engine.incarnation)
            if engine.serves or len(self._admitted) < MOST_ADMITTED:
                self._admitted[engine.name] = slot
        for name, since in self._before.leaving.items():
            if 0 <= self._now - since < SETTLE:
                self._leaving.setdefault(name, since)

    def _still_held(self, engine: Engine, slot: Admission) -> Admission | None:
        if self._is_done(engine, slot):
            return None
        if self._is_still_wanted(slot.pair) and engine.name not in self._wave.lost:
            return replace(slot, incarnation=engine.incarnation)
        # It holds the slot until this load has ended.
        return replace(slot, digest="") if engine.paused_for == slot.pair else None

    def _is_withdrawn(self, engine: Engine, slot: Admission) -> bool:
        """Return whether a holder that has not used its slot up may read of it again."""
        return engine.has_given_up(slot) or not self._is_done(engine, slot)

    def _is_done(self, engine: Engine, slot: Admission) -> bool:
        """Return whether the holder of a slot needs it no more."""
        if engine.paused_for is not None:
            return engine.paused_for != slot.pair and not slot.digest
        is_there = engine.applied is not None and engine.applied >= slot.pair
        is_stopped = engine.applied != slot.pair and engine.applied in self._wave.stopped_pairs
        has_ended = not slot.digest or engine.has_given_up(slot)
        return (is_there and not is_stopped) or has_ended or (slot.free and engine.serves)

    def _is_still_wanted(self, pair: Pair) -> bool:
        wave = self._wave
        if pair in wave.stopped_pairs:
            return False
        is_approved = (
            wave.approved is not None and pair <= wave.approved.pair and pair[0] == wave.approved.generation
        )
        return is_approved or (wave.candidate is not None and pair == wave.candidate.pair)

    def _taken_units(self) -> set[str]:
        """Return the units that pause or may: a slot that has lasted for longer than `patience` does not count."""
        taken = {
            self._by_name[name].unit
            for name, slot in self._admitted.items()
            if not slot.free and self._now - slot.since < self._wave.patience
        }
        return taken | {self._unit(name) for name in self._leaving}

    def _unit(self, name: str) -> str:
        """Return the unit of an explorer; one that is dead, and may return, is a unit of its own."""
        engine = self._by_name.get(name)
        return engine.unit if engine is not None else f"dead {name}"

    def _waits_for_canaries(self, wanted: Mapping[str, GoodVersion]) -> Iterator[str]:
        """Yield those that have nothing to load until canaries have shown the candidate to be good."""
        candidate = self._wave.candidate
        if candidate is None or candidate == self._wave.approved:
            return
        for engine in self._fleet.engines:
            is_busy = engine.name in wanted or engine.name in self._admitted
            if engine.waits and not is_busy and self._wants(engine, candidate):
                yield engine.name

    def _phase(self, wanted: Mapping[str, GoodVersion]) -> str:
        wave, published = self._wave, self._fleet.published
        if published is not None and wave.candidate is None:
            return STOPPED
        if wave.candidate is not None and wave.candidate != wave.approved:
            return CANARY
        return ROLLING if wanted or self._admitted else IDLE

    def _why(self, waiting: list[str], wanted: Mapping[str, GoodVersion], taken: set[str]) -> str:
        """Return why the first of those that wait does so."""
        if not waiting:
            return ""
        if waiting[0] in wanted:
            return f"{len(taken)} of {self._wave.limit} slots are taken"
        candidate = self._wave.candidate
        assert candidate is not None  # else nobody waits for canaries
        name = f"{candidate.generation}.{candidate.step}"
        testing = [engine for engine, slot in self._admitted.items() if slot.pair == candidate.pair]
        return f"{', '.join(sorted(testing)) or 'a canary'} must show first that {name} is good"
