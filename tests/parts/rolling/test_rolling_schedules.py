"""Rolling updates in simulated fleets: the promises hold, and each rule that is broken is found out."""

import inspect
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support import rolling_schedules
from support.rolling_schedules import RULES, BrokenPromiseError, reaches_all, search

from explorer_hooks.parts.rolling import turns
from syncd.parts.rolling import admit

SCHEDULES = int(os.environ.get("ROLLING_SCHEDULES", "60"))
"""`make test-rolling` sets 10,000."""

MUTANTS = {
    "one more slot": (
        admit,
        "{engine.unit}) > self._wave.limit\n",
        "{engine.unit}) > self._wave.limit + 1\n",
        0,
    ),
    "no canary is needed": (admit, "is_vouched = self._policy.canaries == 0 or", "is_vouched = True or", 7),
    "a stopped version is tested": (admit, "newest.pair not in self._pairs and self", "self", 7),
    "nobody stops a version": (admit, "reasons and len(reasons) >= self._policy.wrong", "False", 7),
    "one that gave it up keeps its slot": (admit, " or engine.has_given_up(slot)", "", 4),
    "a free slot stays": (admit, "or has_ended or (slot.free and engine.serves)", "or has_ended", 94),
    "a load that hangs holds its slot": (
        admit,
        "if not slot.free and self._now - slot.since < self._wave.patience",
        "if not slot.free",
        122,
    ),
    "a load that hangs is a canary": (admit, "engine.waits and not is_late and", "engine.waits and", 39),
    "a withdrawn slot is free at once": (admit, "self._leaving[name] = self._now", "pass", 24),
    "each version begins a new test": (
        admit,
        "return shown < self._needed(tested) and",
        "return False and",
        0,
    ),
    "a free slot holds for one that serves": (turns, " and not (slot.free and applied is not None)", "", 522),
    "alone to a candidate": (
        turns,
        "approved is None or pair != approved.pair or",
        "approved is None or",
        51,
    ),
    "all go alone at once": (turns, "len(loading) + order.index(mine) < wave.limit", "wave.limit", 0),
}
"""By name: the module, the rule, what it is replaced by, and the schedule that found it out the last time."""

DEADLY_MUTANTS = {
    "any number that ends stops nothing": ("AT_LEAST_LOST = 2", "AT_LEAST_LOST = 99", 56),
    "one that starts again is not lost": ("engine.incarnation != slot.incarnation and", "False and", 1066),
    "one that died is not lost": ("return is_dead", "return False", 202),
}
"""The same of rules that only versions find out which end whatever loads them."""


@pytest.mark.slow
def test_no_promise_is_broken_in_random_schedules():
    totals = search(range(SCHEDULES))
    assert all(
        totals[name] for name in ("loads", "stops", "terms", "alone", "deaths", "rollbacks", "fenced")
    ), totals


@pytest.mark.slow
def test_a_version_that_ends_whatever_loads_it_is_stopped_after_a_few_engines():
    assert search(range(SCHEDULES), deadly=0.1)["stops"]


def test_engines_that_ran_nothing_when_a_rollback_came_do_not_pause_all_at_once():
    search([1656])


def test_a_host_with_an_engine_that_ran_nothing_when_a_rollback_came_waits_for_its_turn():
    search([8233])


def test_a_follower_that_returns_as_its_slot_ends_does_not_pause_beside_the_next():
    search([7219])


def test_a_follower_that_gave_up_and_starts_again_does_not_pause_beside_the_next():
    search([5296])


def test_a_version_that_was_stopped_long_ago_and_runs_somewhere_is_not_given_to_anybody_again():
    search([4801])


@pytest.mark.slow
def test_without_faults_all_run_the_newest_version_however_often_versions_come():
    for seed in range(SCHEDULES // 2):
        reaches_all(seed)


def mutated(module, old, new):
    """Return the rules with one of them changed in the source of its module."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    changed = ModuleType(f"{module.__name__}_mutant")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    exec(compile(source.replace(old, new), changed.__name__, "exec"), changed.__dict__)
    names = {name: getattr(changed, name, value) for name, value in vars(RULES).items()}
    return SimpleNamespace(**names)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found_out(name):
    *mutant, first = MUTANTS[name]
    with pytest.raises(BrokenPromiseError):
        search_both(mutated(*mutant), first)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEADLY_MUTANTS)
def test_a_broken_rule_for_deadly_versions_is_found_out(name):
    *mutant, first = DEADLY_MUTANTS[name]
    rules = mutated(admit, *mutant)
    with pytest.raises(BrokenPromiseError):
        search([first, *range(200)], rules, deadly=0.1)


def search_both(rules, first):
    for seed in (first, *range(400)):
        reaches_all(seed, rules)
        search([seed], rules)


def test_the_simulator_uses_the_rules_of_the_product():
    assert rolling_schedules.RULES.admit is admit.admit
    assert rolling_schedules.RULES.goes_alone is turns.goes_alone
