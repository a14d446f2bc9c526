"""Retention: which rule keeps or removes each step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import complete, filling, published, snapshot

from syncd.config import DaemonConfig
from syncd.daemon.chains import chain_length
from syncd.daemon.retention import decide, removable
from syncd.daemon.snapshot import Module, Snapshot
from syncd.protocol.presence import Presence
from syncd.protocol.request import Pin
from syncd.protocol.step import StepShortcut, StepState


def rules(looked: Snapshot, policy: DaemonConfig | None = None, **retention) -> dict[int, str]:
    decisions = decide(looked, policy or DaemonConfig(**retention))
    return {decision.step: ("" if decision.keep else "-") + decision.rule for decision in decisions}


def job(*steps, newest: int, previous: int | None = None, **more) -> Snapshot:
    version = published(complete(newest), previous=(1, previous) if previous is not None else None)
    return snapshot(*steps, marker=newest, version=version, **more)


def explorer(*leases: int, alive: bool = True) -> Module:
    return Module(Presence("e", leases=leases), alive)


def numbered(*numbers, **more):
    return [complete(number, **more) for number in numbers]


def test_no_step_is_removed_before_the_first_publish():
    assert rules(snapshot(*numbered(1, 2, 3), marker=3)) == dict.fromkeys((1, 2, 3), "unpublished")


@pytest.mark.fault("versions faster than the poll leak")
def test_superseded_steps_are_removed_even_if_never_published():
    found = rules(job(*numbered(1, 2, 3, 4, 5), newest=5, previous=1), keep_last=2)
    assert found == {
        1: "previous_version",
        2: "-superseded",
        3: "-superseded",
        4: "keep_last",
        5: "newest_version",
    }


@pytest.mark.fault("a step is pruned while it is read")
def test_a_leased_step_is_kept_while_its_explorer_lives():
    looked = job(*numbered(1, 2, 3, 4), newest=4, previous=3, explorers={"e": explorer(1)})
    assert rules(looked)[1] == "leased"
    dead = job(*numbered(1, 2, 3, 4), newest=4, previous=3, explorers={"e": explorer(1, alive=False)})
    assert rules(dead)[1] == "-superseded"


@pytest.mark.fault("a dead explorer counts for ever")
def test_a_lease_of_a_dead_explorer_keeps_no_step():
    looked = job(*numbered(1, 2, 3), newest=3, previous=2, explorers={"e": explorer(1, alive=False)})
    assert rules(looked, keep_last=1)[1] == "-superseded"


def test_every_nth_step_is_kept_with_keep_every():
    assert rules(job(*numbered(*range(1, 9)), newest=8, previous=7), keep_every=4)[4] == "keep_every"


@pytest.mark.fault("the old full checkpoint is deleted before the new one is tracked")
def test_full_checkpoints_are_kept_up_to_keep_full():
    steps = [*numbered(1, 2, 3, full=True), *numbered(4, 5)]
    assert [rules(job(*steps, newest=5, previous=4))[n] for n in (1, 2, 3)] == ["full_checkpoint"] * 3
    last = rules(job(*steps, newest=5, previous=4), keep_full=2)
    assert last == {
        1: "-keep_full",
        2: "full_checkpoint",
        3: "full_checkpoint",
        4: "previous_version",
        5: "newest_version",
    }


def test_the_checkpoint_that_a_trainer_resumed_from_is_always_kept():
    """After going back the highest full checkpoint is not the one that counts."""
    steps = [complete(1, full=True), complete(5, full=True), complete(6), complete(7)]
    version = published(complete(7), 2, previous=(2, 6), abandoned=((5, complete(5).digest),))
    looked = snapshot(*steps, marker=7, version=version, tracker=1)
    assert rules(looked, keep_full=1) == {
        1: "resumed_from", 5: "-abandoned", 6: "previous_version", 7: "newest_version"
    }  # fmt: skip
    assert rules(replace(looked, tracker=None), keep_full=1)[1] == "full_checkpoint"


def test_a_lease_of_a_trainer_keeps_its_step():
    trainer = {"t": Module(Presence("t", leases=(1,)))}
    assert rules(job(*numbered(1, 2, 3, 4), newest=4, previous=3, trainers=trainer))[1] == "leased"


def test_an_unreadable_presence_keeps_every_step():
    unreadable = {"e": Module(Presence("e", problem="not a JSON document"))}
    assert set(rules(job(*numbered(1, 2, 3), newest=3, explorers=unreadable)).values()) == {
        "unreadable_presence",
        "newest_version",
    }
    dead = {"e": Module(Presence("e", problem="not a JSON document"), alive=False)}
    assert rules(job(*numbered(1, 2, 3, 4), newest=4, previous=3, explorers=dead))[1] == "-superseded"


def test_a_damaged_step_is_removed_only_after_a_grace_period():
    """A mount in trouble looks like damage."""
    looked = job(replace(complete(1), state=StepState.DAMAGED), *numbered(2, 3, 4), newest=4, previous=3)
    assert rules(looked)[1] == "damaged_lately"
    late = replace(looked, steps={**looked.steps, 1: replace(looked.steps[1], unchanged_for=4000.0)})
    assert rules(late)[1] == "-damaged"


def test_a_pinned_step_is_kept():
    assert rules(job(*numbered(1, 2, 3, 4), newest=4, previous=3, pins={1: Pin(1)}))[1] == "pinned"


def test_the_byte_budget_removes_the_oldest_weakly_kept_steps():
    looked = job(*numbered(*range(1, 7)), newest=6, previous=5, pins={1: Pin(1)})
    found = rules(looked, keep_last=6, max_bytes=400)
    assert found == {
        1: "pinned", 2: "-byte_budget", 3: "-byte_budget", 4: "keep_last", 5: "previous_version", 6: "newest_version"
    }  # fmt: skip


def test_the_byte_budget_counts_no_step_that_another_rule_removes():
    looked = job(*numbered(100, 200, 310, 320, 330), newest=330, previous=320)
    found = rules(looked, keep_every=100, keep_last=2, max_bytes=450)
    assert found == {
        100: "keep_every", 200: "keep_every", 310: "-superseded", 320: "previous_version", 330: "newest_version"
    }  # fmt: skip
    assert rules(looked, keep_every=100, keep_last=2, max_bytes=399) == found | {100: "-byte_budget"}


def test_the_byte_budget_never_removes_protected_steps():
    looked = job(*numbered(1, 2, 3), newest=3, previous=2, explorers={"e": explorer(1)})
    assert rules(looked, max_bytes=1) == {1: "leased", 2: "previous_version", 3: "newest_version"}


def test_every_step_of_a_delta_chain_is_kept():
    steps = [
        complete(1),
        complete(2, parent=1, kind="delta"),
        complete(3, parent=2, kind="delta"),
        complete(4),
    ]
    found = rules(job(*steps, newest=4, previous=3), keep_last=1)
    assert found == {1: "chain", 2: "chain", 3: "previous_version", 4: "newest_version"}


def changed(number, parent, size=10):
    return replace(complete(number), kind="delta", parent=parent, size=size, whole_size=100)


def keyframe(number, parent, size=10, problem=""):
    return replace(complete(number), shortcut=StepShortcut(parent, size, 0.01, problem), whole_size=100)


def reader(applied, *, alive=True, reads=("delta",), digest=""):
    return Module(Presence("r", applied=(1, applied), applied_digest=digest, reads=reads), alive)


BEHIND = [complete(1), *(changed(n, n - 1) for n in (2, 3, 4)), keyframe(5, 4), changed(6, 5)]
CAUGHT_UP = {1: "chain", 2: "chain", 3: "catch_up", 4: "catch_up"}
"""What an explorer that runs step 2 needs, and the links of that."""


@pytest.mark.parametrize(
    ("why", "module", "kept"),
    [
        ("it reads deltas", reader(2), True),
        ("it reads no deltas", reader(2, reads=()), False),
        ("it is dead", reader(2, alive=False), False),
        ("it runs another content of the step", reader(2, digest="sha256:other"), False),
        ("it runs this content", reader(2, digest=BEHIND[1].digest), True),
        ("its step is later", reader(9), False),
    ],
)
def test_what_a_living_explorer_needs_to_catch_up_by_changes_is_kept(why, module, kept):
    found = rules(job(*BEHIND, newest=6, previous=5, explorers={"r": module}), keep_last=1)
    assert found == {
        **(CAUGHT_UP if kept else dict.fromkeys((1, 2, 3, 4), "-superseded")),
        5: "previous_version",
        6: "newest_version",
    }, why


def test_an_explorer_needs_no_changes_that_are_more_than_a_whole_step_or_that_it_cannot_use():
    for odd in (keyframe(5, 4, 81), keyframe(5, 4, problem="lost"), replace(keyframe(5, 4), shortcut=None)):
        steps = [*BEHIND[:4], odd, BEHIND[5]]
        found = rules(job(*steps, newest=6, previous=5, explorers={"r": reader(2)}), keep_last=1)
        assert [found[n] for n in (1, 2, 3, 4)] == ["-superseded"] * 4
    steps = [*BEHIND[:4], keyframe(5, 4, 69), BEHIND[5]]
    assert rules(job(*steps, newest=6, explorers={"r": reader(2)}), keep_last=1)[3] == "catch_up"
    without = [step for step in BEHIND if step.step != 4]
    assert rules(job(*without, newest=6, explorers={"r": reader(2)}), keep_last=1)[3] == "-superseded"


def test_the_byte_budget_overrides_what_explorers_need_to_catch_up():
    looked = job(*BEHIND, newest=6, previous=5, explorers={"r": reader(2)})
    assert rules(looked, keep_last=1, max_bytes=1)[3] == "-byte_budget"


def test_a_link_of_a_chain_says_which_step_by_which_rule_needs_it():
    looked = job(*BEHIND, newest=6, previous=5, explorers={"r": reader(3)})
    details = {one.step: one.detail for one in decide(looked, DaemonConfig(keep_last=1))}
    assert details[2] == "step 4 (catch_up) is stored as changes of it"
    assert details[4] == "explorer r reaches step 6 by 30 bytes of changes"


@pytest.mark.fault("an evaluator lists half-written checkpoints")
def test_a_partial_step_is_kept_until_it_is_stale():
    looked = job(filling(2), complete(3), newest=3)
    assert rules(looked)[2] == "being_written"
    stale = job(replace(filling(2), unchanged_for=4000.0), complete(3), newest=3)
    assert rules(stale)[2] == "-stale_partial"
    ahead = job(complete(3), replace(filling(9), unchanged_for=4000.0), newest=3)
    assert rules(ahead)[9] == "being_written"


def test_foreign_steps_are_kept_unless_pruning_them_is_enabled():
    steps = numbered(1, 2, 3, 4, layout="trinity-0.6")
    assert rules(job(*steps, newest=4, previous=3))[1] == "foreign"
    assert rules(job(*steps, newest=4, previous=3), DaemonConfig(prune_foreign=True))[1] == "-superseded"


def test_no_step_is_removed_if_pruning_is_off():
    assert set(rules(job(*numbered(1, 2, 3), newest=3), DaemonConfig(prune=False)).values()) == {
        "pruning_off"
    }


def test_sealed_steps_ahead_of_the_version_are_kept():
    assert rules(job(complete(3), complete(4), newest=3))[4] == "not_yet_published"


leases = st.lists(st.integers(0, 12), max_size=3).map(tuple)
states = st.sampled_from(list(StepState))


@st.composite
def jobs(draw):
    found = draw(
        st.lists(
            st.tuples(st.integers(0, 12), states, st.booleans(), st.booleans()),
            max_size=13,
            unique_by=lambda i: i[0],
        )
    )
    steps = [
        replace(
            complete(n),
            state=state,
            full=full,
            parent=n - 1 if delta and n else None,
            kind="delta" if delta and n else "weights",
            shortcut=StepShortcut(n - 1, 20, 0.1) if n % 3 == 0 and not delta else None,
            whole_size=100,
            unchanged_for=n * 900.0,
        )
        for n, state, full, delta in found
    ]
    return job(
        *steps,
        newest=draw(st.integers(0, 12)),
        previous=draw(st.integers(0, 12)),
        pins={n: Pin(n) for n in draw(st.sets(st.integers(0, 12), max_size=2))},
        explorers={
            "a": explorer(*draw(leases)),
            "r": reader(draw(st.integers(0, 12))),
            "b": explorer(*draw(leases), alive=draw(st.booleans())),
        },
    )


policies = st.builds(
    DaemonConfig,
    keep_last=st.integers(1, 4),
    keep_every=st.integers(0, 4),
    keep_full=st.integers(0, 2),
    max_bytes=st.sampled_from([0, 1, 300]),
)


@given(jobs(), policies)
@settings(max_examples=500)
def test_leased_pinned_published_and_newest_complete_steps_are_never_removed(looked, policy):
    removed = {decision.step for decision in decide(looked, policy) if not decision.keep}
    assert removed <= looked.steps.keys()
    assert not removed & looked.leases.keys()
    assert not removed & looked.pins.keys()
    assert looked.version is not None
    assert looked.version.step not in removed
    assert looked.version.previous is None or looked.version.previous[1] not in removed
    kept = looked.steps.keys() - removed
    for number in kept:
        link = number
        while (parent := looked.steps[link].parent) is not None and parent in looked.steps:
            assert parent not in removed, "a link of a kept chain"
            link = parent
    complete_ones = [n for n, step in sorted(looked.steps.items()) if step.state is StepState.COMPLETE]
    newest = looked.version.step
    assert not removed & {n for n in complete_ones if n >= newest}, "complete and not yet passed"
    if not policy.max_bytes:
        sync = [n for n in complete_ones if n <= newest and not looked.steps[n].full]
        assert not removed & set(sync[-policy.keep_last :]), "the newest complete steps"
    full = sorted(number for number, step in looked.steps.items() if step.full)
    assert not removed & set(full[-policy.keep_full :] if policy.keep_full else full)


@given(jobs(), policies)
@settings(max_examples=200)
def test_every_step_has_exactly_one_decision_with_a_rule(looked, policy):
    decisions = decide(looked, policy)
    assert [decision.step for decision in decisions] == sorted(looked.steps)
    assert all(decision.rule for decision in decisions)


def test_without_keep_previous_keep_full_limits_the_previous_version_too():
    """A previous version that is a sync step stays in any case; a reader's lease keeps the other one, too."""
    looked = job(*numbered(1, 3, full=True), complete(2), newest=3, previous=1)
    assert rules(looked, keep_full=1)[1] == "previous_version"
    assert rules(looked, keep_full=1, keep_previous=False)[1] == "-keep_full"
    leased = job(*numbered(1, 3, full=True), newest=3, previous=1, explorers={"e": explorer(1)})
    assert rules(leased, keep_full=1, keep_previous=False)[1] == "leased"
    synced = job(*numbered(1, 2, 3, 4), newest=4, previous=1)
    assert rules(synced, keep_last=1, keep_previous=False)[1] == "previous_version"


class Counted(dict):
    """Steps that count how often one is looked up."""

    lookups = 0

    def get(self, key, default=None):
        self.lookups += 1
        return super().get(key, default)

    def __getitem__(self, key):
        self.lookups += 1
        return super().__getitem__(key)


def lookups(links):
    """Return how often a decision looks up a step: a chain, and ten explorers at each of its links."""
    chain = [complete(0), *(changed(number, number - 1, size=0) for number in range(1, links + 1))]
    modules = {f"e{n}": reader(n % links) for n in range(10 * links)}
    looked = job(*chain, newest=links, explorers=modules)
    steps = Counted(looked.steps)
    found = decide(replace(looked, steps=steps), DaemonConfig())
    assert [decision.rule for decision in found].count("catch_up") == links - 2
    list(removable(found, steps))
    return steps.lookups


def test_a_decision_costs_in_proportion_to_steps_and_explorers():
    assert lookups(200) < 4.5 * lookups(50)


def test_chain_lengths_of_all_steps_are_counted_in_one_pass():
    steps = Counted({step.step: step for step in [complete(0), *(changed(n, n - 1) for n in range(1, 301))]})
    counted = {}
    assert [chain_length(steps, step, counted) for step in reversed(steps.values())] == [*range(300, -1, -1)]
    assert steps.lookups < 1000
    steps[100] = replace(steps[100], state=StepState.DAMAGED)
    counted = {}
    assert [chain_length(steps, steps[n], counted) for n in (150, 99, 100, 101, 300)] == [
        None,
        99,
        None,
        None,
        None,
    ]
