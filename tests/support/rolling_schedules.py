"""Rolling updates in a simulated fleet: the rules of the product, and engines, followers and daemons that go wrong.

    python -m support.rolling_schedules [SCHEDULES] [FIRST]   (in tests/) search random fleets for a broken promise

A follower sees the wave, and a daemon the presences, as they were up to `lag` seconds ago. Two daemons lead in turn:
each may be killed or paused, and whoever wakes up under an old term is refused. Engines fail, hang and die; versions
may be bad. What is checked all the time:

1. While somebody leads, no more units pause than the wave allows. Those that have gone alone are counted apart, and
   are no more either: a new leader does not see at once who has.
2. A bad version reaches at most as many engines as are canaries or stop it.
   A deadly one, which ends each engine and its follower (`deadly`), is stopped after as few.
3. Nobody is admitted to a stopped version, or begins to load it once all can know.
4. Once the faults end, all engines come to run the newest good version.
"""

import math
import random
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from explorer_hooks.parts.rolling import turns
from syncd.parts.rolling import admit as admitting
from syncd.parts.rolling.daemon import inherited
from syncd.protocol.rolling import ALONE, Wave
from syncd.protocol.version import GoodVersion

TTL, TAKEOVER, TICK = 20.0, 8.0, 1.0
RULES = SimpleNamespace(
    admit=admitting.admit,
    Fleet=admitting.Fleet,
    Engine=admitting.Engine,
    Policy=admitting.Policy,
    target=turns.target,
    is_admitted=turns.is_admitted,
    goes_alone=turns.goes_alone,
    Other=turns.Other,
)


class BrokenPromiseError(AssertionError):
    """A promise does not hold in a schedule."""


def version_of(pair):
    return GoodVersion(*pair, "weights", f"global_step_{pair[1]}/actor", f"digest {pair[1]}")


@dataclass
class Follower:
    """One engine with its follower."""

    name: str
    unit: str
    lag: float
    applied: tuple | None = None
    serves: bool = False
    loading: tuple | None = None
    had: tuple | None = None  # what it served before this load
    ends: float = 0.0
    began: float = 0.0
    alone: bool = False
    gave_up: dict = field(default_factory=dict)
    dead_until: float | None = None
    died: float = -1e9
    broken: bool = False
    incarnation: int = 1
    beat: tuple = (0, 0)
    beaten: float = 0.0
    loading_since: dict = field(default_factory=dict)

    @property
    def alive(self):
        return self.dead_until is None


@dataclass
class Daemon:
    """One of two daemons."""

    name: str
    down_until: float = -1.0  # killed
    paused_until: float = -1.0  # stopped by a signal, and does not know it
    term: int = 0
    wave: Wave | None = None


class Fleet:
    """One schedule."""

    def __init__(
        self, seed, rules=RULES, *, faults=True, interval=None, policy=None, count=None, publish_until=None,
        deadly=0.0,
    ):  # fmt: skip
        self.random, self.seed, self.rules = random.Random(seed), seed, rules
        chance = self.random
        self.count = count or chance.randint(1, 9)
        self.policy = policy or rules.Policy(
            max_paused=chance.choice([1, 1, 2, 3, 0.25, 0.5]),
            canaries=chance.choice([0, 1, 1, 2]),
            wrong=chance.choice([1, 1, 2]),
            patience=chance.choice([25.0, 60.0]),
            unit=chance.choice(["engine", "engine", "host"]),
        )
        self.faults, self.interval = faults, interval or chance.choice([6.0, 15.0, 40.0])
        self.load, self.lag = chance.choice([(1.0, 3.0), (4.0, 8.0)]), chance.choice([0.0, 2.0, 4.0])
        self.calm = 160.0
        self.publish_until = publish_until if publish_until is not None else self.calm
        self.followers = [self._follower(number) for number in range(self.count)]
        self.daemons = [Daemon("a"), Daemon("b")]
        self.now, self.term, self.leader = 0.0, 0, None
        self.led_at = -1e9  # when somebody led last
        self.wave = None
        self.waves = deque([(0.0, None)])
        self.presences = deque()
        self.seen = {}
        self.published, self.last_good, self.by_rollback = None, None, False
        self.step, self.generation, self.next_publish = 0, 1, 0.0
        self.bad = {step for step in range(1, 200) if faults and chance.random() < 0.15}
        self.spoiled, self.excused, self.stopped_at = {}, {}, {}
        apart = random.Random(-1 - seed)
        if (
            deadly
        ):  # whoever has died counts as late before it counts as dead if patience is shorter than that takes
            self.policy = replace(self.policy, patience=60.0)
        self.deadly = {step for step in range(1, 200) if apart.random() < deadly}
        self.killed = {}
        self.counts = {
            "loads": 0,
            "stops": 0,
            "terms": 0,
            "alone": 0,
            "deaths": 0,
            "rollbacks": 0,
            "fenced": 0,
        }

    def _follower(self, number):
        chance, unit = self.random, f"u{number}"
        if self.policy.unit == "host":
            unit = f"host{number // 2}"
        return Follower(
            f"e{number}", unit, chance.uniform(0, self.lag), broken=self.faults and chance.random() < 0.08
        )

    # --- time ---------------------------------------------------------------------------------------------------

    def run(self, end):
        while self.now < end:
            if self.faults and self.now < self.calm:
                self._strike()
            self._elect()
            for daemon in self.daemons:
                self._wake(daemon)
            for follower in self.followers:
                self._follow(follower)
            self._publish_presences()
            self._check()
            self.now += TICK
        return self

    def _strike(self):
        chance = self.random
        if chance.random() < 0.01:
            daemon = chance.choice(self.daemons)
            how, until = (
                chance.choice(["down_until", "paused_until"]),
                self.now + chance.choice([4.0, 20.0, 90.0]),
            )
            setattr(daemon, how, until)
        if chance.random() < 0.004:
            both = self.now + 90.0
            for daemon in self.daemons:
                daemon.down_until = both
        for follower in self.followers:
            if follower.alive and chance.random() < 0.002:
                self._kill(follower)

    def _kill(self, follower):
        self.counts["deaths"] += 1
        follower.dead_until, follower.died = self.now + self.random.choice([2.0, 15.0, 60.0]), self.now
        for names in self.spoiled.values():
            if follower.name in names:
                self.excused.setdefault(id(names), set()).add(follower.name)
        if follower.loading is not None:
            follower.applied, follower.serves = None, False  # its engine is half loaded
        elif self.random.random() < 0.5:
            follower.applied, follower.serves = None, False  # its engine died with it
        follower.loading = None

    # --- daemons ------------------------------------------------------------------------------------------------

    def _elect(self):
        leader = self.leader
        if leader is not None and leader.down_until > self.now:
            leader.wave, leader.term, self.leader, self.led_at = None, 0, None, self.now
            leader = None
        if leader is not None and leader.paused_until > self.now:
            if self.now - self.led_at < TAKEOVER:
                return
            leader = None  # a stand-by may take its place; it does not know
        elif leader is not None:
            self.led_at = self.now
            return
        if self.now - self.led_at < TAKEOVER and self.term:
            return
        able = [daemon for daemon in self.daemons if max(daemon.down_until, daemon.paused_until) <= self.now]
        if able:
            self.term += 1
            self.counts["terms"] += 1
            chosen = able[0]
            chosen.term, chosen.wave = self.term, None
            self.leader, self.led_at = chosen, self.now
            self.seen = {}

    def _wake(self, daemon):
        """Let a daemon work that leads, or believes that it does."""
        if max(daemon.paused_until, daemon.down_until) > self.now or daemon.term == 0:
            return
        if daemon.term != self.term:
            self.counts["fenced"] += 1  # the server refuses its next rename, and it stands by
            daemon.term, daemon.wave = 0, None
        elif daemon is self.leader:
            self._publish_version()
            self._roll(daemon)

    def _roll(self, daemon):
        before = daemon.wave or inherited(self.wave, self.now)
        fleet = self.rules.Fleet(
            engines=tuple(self._living()),
            ended=tuple(self._ended()),
            published=self.published,
            last_good=self.last_good,
            by_rollback=self.by_rollback,
            readable=frozenset(self._readable(before)),
        )
        wave = replace(self.rules.admit(fleet, self.policy, before, self.now), term=daemon.term)
        wave = replace(wave, beat=before.beat + 1)
        known = before.stopped_pairs
        for stopped in wave.stopped:
            if stopped.pair not in known and stopped.pair not in self.stopped_at:
                self.stopped_at[stopped.pair] = self.now
                self.counts["stops"] += 1
        self._check_wave(wave)
        daemon.wave = self.wave = wave
        self.waves.append((self.now, wave))
        while len(self.waves) > 8:
            self.waves.popleft()
        good = [item.applied for item in fleet.engines if item.applied and item.serves]
        good = [pair for pair in good if pair not in wave.stopped_pairs]
        best = max(good, default=None)
        if best is not None and (self.last_good is None or best > self.last_good.pair):
            self.last_good = version_of(best)
        if self.last_good is not None and self.last_good.pair in wave.stopped_pairs:
            self.last_good = None

    def _readable(self, wave):
        stopped = {
            (item.step, item.digest)
            for item in wave.stopped
            if self.published is None or item.generation == self.published.generation
        }
        for step in range(1, self.step + 1):
            key = (step, f"digest {step}")
            if key not in stopped:
                yield key

    def _living(self):
        """Return what the daemon reads: presences that are some seconds old, of those that beat lately."""
        for name, (beaten, engine) in self._read_presences(self.lag).items():
            before = self.seen.get(name)
            if before is None or before[0] != beaten:
                self.seen[name] = before = (beaten, self.now)
            if self.now - before[1] < TTL:
                yield engine

    def _ended(self):
        """Return what those said last whose presences the daemon takes for dead."""
        for name, (beaten, engine) in self._read_presences(self.lag).items():
            before = self.seen.get(name)
            if before is not None and before[0] == beaten and self.now - before[1] >= TTL:
                yield engine

    def _read_presences(self, lag):
        wanted = self.now - lag
        at_least = [item for item in self.presences if item[0] <= wanted]
        return at_least[-1][1] if at_least else {}

    def _publish_version(self):
        if self.now < self.next_publish or self.now > self.publish_until:
            return
        self.next_publish = self.now + self.interval
        stopped = self.published is not None and self.published.pair in (
            self.wave.stopped_pairs if self.wave else ()
        )
        if self.faults and self.step > 3 and self.random.random() < 0.06:
            good = [step for step in range(1, self.step) if step not in self.bad | self.deadly]
            back = (
                self.published.step
                if stopped and self.random.random() < 0.5
                else (good[-1] if good else None)
            )
            if back is not None:
                self.generation += 1
                self.published, self.by_rollback = version_of((self.generation, back)), True
                self.counts["rollbacks"] += 1
                return
        self.step += 1
        self.published, self.by_rollback = version_of((self.generation, self.step)), False

    # --- followers ----------------------------------------------------------------------------------------------

    def _follow(self, follower):
        if not follower.alive:
            if self.now >= follower.dead_until:
                follower.dead_until, follower.gave_up, follower.beaten = None, {}, self.now
                follower.incarnation += 1
            return
        if follower.loading is not None:
            if self.now >= follower.ends:
                self._finish(follower)
            return
        wave = self._wave_for(follower)
        if wave is None or self.published is None:
            return
        if (wave.term, wave.beat) != follower.beat:
            follower.beat, follower.beaten = (wave.term, wave.beat), self.now
        pair = self.rules.target(wave, follower.name, self.published.pair, follower.applied)
        if pair is None or pair == follower.applied or (*pair, f"digest {pair[1]}") in follower.gave_up:
            return
        admitted = self.rules.is_admitted(wave, follower.name, pair, follower.applied)
        alone = (
            not admitted and self.now - follower.beaten >= ALONE and self._goes_alone(follower, wave, pair)
        )
        if admitted or alone:
            self._begin(follower, pair, alone=alone)

    def _wave_for(self, follower):
        wanted = self.now - follower.lag
        seen = [wave for at, wave in self.waves if at <= wanted]
        return seen[-1] if seen else self.waves[0][1]

    def _goes_alone(self, follower, wave, pair):
        others = []
        for name, (beaten, engine) in self._read_presences(follower.lag).items():
            if self.now - beaten >= TTL:
                continue
            since = follower.loading_since.get(name)
            if engine.paused_for is None:
                follower.loading_since.pop(name, None)
            elif since is None or since[0] != engine.paused_for:
                since = follower.loading_since[name] = (engine.paused_for, self.now)
            is_loading = engine.paused_for is not None and self.now - since[1] < wave.patience
            gave_up = wave.approved is not None and engine.has_given_up(wave.approved)
            others.append(self.rules.Other(name, engine.unit, engine.applied, is_loading, gave_up))
        return self.rules.goes_alone(wave, follower.name, pair, others)

    def _begin(self, follower, pair, *, alone):
        self.counts["loads"] += 1
        self.counts["alone"] += alone
        stopped_at = self.stopped_at.get(pair)
        if stopped_at is not None and self.now - stopped_at > self.lag + 2 * TICK:
            self._fail(
                f"{follower.name} begins to load {pair}, which was stopped {self.now - stopped_at:.0f} s ago"
            )
        follower.loading, follower.began, follower.alone = pair, self.now, alone
        follower.had = follower.applied if follower.serves else None
        slow = 1
        if self.faults and self.now < self.calm and self.random.random() < 0.02:
            slow = self.random.choice([20, 1000])  # for the whole schedule, that is
        follower.ends = self.now + self.random.uniform(*self.load) * slow

    def _finish(self, follower):
        pair = follower.loading
        if pair[1] in self.deadly:
            self.killed.setdefault(pair, set()).add(follower.name)
            self._kill(follower)
            return
        follower.loading = None
        is_bad = pair[1] in self.bad
        if is_bad:
            self.spoiled.setdefault(pair, set()).add(follower.name)
        fails = self.faults and self.now < self.calm and follower.broken and self.random.random() < 0.5
        if is_bad or fails:
            follower.gave_up = {**follower.gave_up, (*pair, f"digest {pair[1]}"): "other weights"}
            return  # it goes back to what it served
        follower.applied, follower.serves = pair, True

    def _publish_presences(self):
        before = self.presences[-1][1] if self.presences else {}
        now = {}
        for follower in self.followers:
            if not follower.alive:
                if follower.name in before:
                    now[follower.name] = before[follower.name]
                continue
            engine = self.rules.Engine(
                follower.name, follower.unit, follower.applied, is_proven=follower.serves, serves=follower.serves,
                paused_for=follower.loading, gave_up=follower.gave_up, incarnation=str(follower.incarnation),
            )  # fmt: skip
            now[follower.name] = (self.now, engine)
        self.presences.append((self.now, now))
        while len(self.presences) > 8:
            self.presences.popleft()

    # --- promises -----------------------------------------------------------------------------------------------

    def _fail(self, text):
        raise BrokenPromiseError(
            f"seed {self.seed} at {self.now:.0f} s: {text} ({self.policy}, {self.count} engines)"
        )

    def _check(self):
        self._check_paused()
        self._check_alone()
        if self.policy.canaries:
            for pair, names in self.spoiled.items():
                count = len(names - self.excused.get(id(names), set()))
                if count > self.policy.canaries + self.policy.wrong:
                    self._fail(f"{pair} is bad and spoiled {count} engines")
            for pair, names in self.killed.items():
                if len(names) > self.policy.canaries + max(self.policy.wrong, 2):
                    self._fail(f"{pair} is deadly and ended {sorted(names)}")

    def _check_paused(self):
        somebody_leads = self.leader is not None and self.leader.paused_until <= self.now
        if not somebody_leads or self.wave is None:
            return
        slots = self.wave.admitted
        paused = {
            item.unit
            for item in self.followers
            if item.alive
            and item.loading
            and item.had
            and not item.alone
            and self.now - self._since(item, slots) < self.policy.patience
        }
        most = self.policy.limit(len({item.unit for item in self.followers}), goes_back=False)
        if len(paused) > most:
            self._fail(f"{len(paused)} of {most} units pause: {sorted(paused)}")

    def _check_alone(self):
        alone = {
            item.unit for item in self.followers if item.alive and item.loading and item.had and item.alone
        }
        if self.wave is not None and len(alone) > self.wave.limit:
            self._fail(f"{sorted(alone)} go alone, and {self.wave.limit} may")

    def _since(self, item, slots):
        slot = slots.get(item.name)
        return min(slot.since, item.began) if slot is not None else item.began

    def _check_wave(self, wave):
        loading = {item.name for item in self.followers if item.loading}
        seen = {name for name, (_, engine) in self._read_presences(self.lag).items() if engine.paused_for}
        wrong = [
            name
            for name, slot in wave.admitted.items()
            if slot.pair in wave.stopped_pairs and name not in loading | seen
        ]
        if wrong:
            self._fail(f"{wrong} are admitted to a stopped version")

    def unfinished(self):
        """Return what is missing for all to run the newest version that is good, empty if nothing is."""
        published, living = self.published, [item for item in self.followers if item.alive]
        if published is None:
            return ""  # nobody led while versions were written
        if published.pair in self.stopped_at or published.step in self.bad | self.deadly:
            wrong = [item.name for item in living if item.applied and item.applied[1] in self.bad]
            return f"{wrong} run a bad version" if wrong else ""
        key = (*published.pair, published.digest)
        behind = [
            item.name
            for item in living
            if item.applied != published.pair and key not in item.gave_up and not self._hangs(item)
        ]
        return f"{behind} do not run {published.pair}" if behind else ""

    def _hangs(self, item):
        return item.loading is not None and item.ends > self.calm + 300.0

    def finish(self, until):
        """Run until all is as it should be, `until` at most."""
        while self.unfinished() and self.now < until:
            self.run(self.now + 10.0)
        if text := self.unfinished():
            self._fail(f"{text}: {self.wave}")


def search(seeds, rules=RULES, *, deadly=0.0):
    """Run schedules, and return what happened in them; raises at the first broken promise.

    Args:
        deadly: The share of versions that end whatever loads them.
    """
    totals = {"schedules": 0}
    for seed in seeds:
        fleet = Fleet(seed, rules, deadly=deadly).run(220.0)
        a_load = fleet.load[1] + fleet.lag + 2
        fleet.finish(fleet.calm + 160.0 + TTL + 3 * (fleet.count + 3) * a_load + fleet.policy.patience)
        for name, count in (*fleet.counts.items(), ("schedules", 1)):
            totals[name] = totals.get(name, 0) + count
    return totals


def reaches_all(seed, rules=RULES):
    """Check that without faults all run the newest version soon after it, however often versions come."""
    chance = random.Random(seed)
    policy = rules.Policy(max_paused=chance.randint(1, 4), canaries=chance.choice([0, 1, 2]), patience=600.0)
    count = chance.randint(1, 14)
    fleet = Fleet(seed, rules, faults=False, interval=3.0, policy=policy, count=count, publish_until=90.0)
    a_load = fleet.load[1] + 2 * fleet.lag + 3 * TICK
    waves = math.ceil(count / policy.max_paused) + policy.canaries + 2
    fleet.run(90.0)
    # A test is not begun anew for each version that comes: then none would ever be approved.
    most_behind = (policy.canaries + 2) * a_load / fleet.interval
    if fleet.wave.approved is None or fleet.step - fleet.wave.approved.step > most_behind:
        raise BrokenPromiseError(f"seed {seed}: {fleet.step} versions, and approved is {fleet.wave.approved}")
    fleet.run(90.0 + 2 * a_load + waves * a_load)
    if text := fleet.unfinished():
        raise BrokenPromiseError(f"seed {seed}: {text} after {waves} waves ({policy}, {count} engines)")


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    first = numbers[1] if len(numbers) > 1 else 0
    seeds = range(first, first + (numbers[0] if numbers else 400))
    for number in seeds:
        reaches_all(number)
    print(search(seeds))
