"""The choice of a way: what takes the least; each is measured again within a bounded number of syncs."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from syncd.transports.measured import AGAIN, RARELY, STICKS, due_after
from trainer.auto_method import ORDER, Measured, Measurements, choose_method

FILES, MEMORY, BROADCAST = ORDER
LACKING = {MEMORY: "no explorer is on this host", BROADCAST: "no explorer takes part"}


def known(number=10, present=FILES, size=100, **seconds):
    """Return measurements of ways by their names, all just made."""
    ways = {name: Measured(number - 1, 100, took) for name, took in seconds.items()}
    lacking = {method: text for method, text in LACKING.items() if method not in ways}
    return Measurements(number, size, ways, lacking, present)


def test_the_fastest_method_is_chosen():
    found = choose_method(known(checkpoint=2.0, memory=1.0, nccl=1.5))
    assert (found.method, found.is_trial) == (MEMORY, False)
    assert found.reason == "memory takes the least: checkpoint 2 s, memory 1 s, nccl 1.5 s"


def test_each_available_method_is_measured_first():
    assert choose_method(Measurements(1, 0)).method is FILES
    ways = {FILES: Measured(1, 100, 1.0)}
    found = choose_method(Measurements(2, 100, ways, {BROADCAST: "nobody"}))
    assert (found.method, found.reason, found.is_trial) == (MEMORY, "memory was not measured yet", True)


def test_an_unavailable_method_is_not_chosen_and_the_reason_is_given():
    found = choose_method(known(checkpoint=5.0))
    assert found.method is FILES
    assert "memory is unavailable: no explorer is on this host" in found.reason
    fast = {FILES: Measured(9, 100, 5.0), MEMORY: Measured(9, 100, 0.1)}
    assert choose_method(Measurements(10, 100, fast, LACKING, MEMORY)).method is FILES


def test_a_small_gain_does_not_change_the_method():
    assert choose_method(known(checkpoint=1.0, memory=0.95)).method is FILES
    assert choose_method(known(checkpoint=1.0, memory=0.95, present=MEMORY)).method is MEMORY
    assert choose_method(known(checkpoint=1.0, memory=0.85)).method is MEMORY


def test_measurements_are_scaled_to_the_size_of_the_next_weights():
    ways = {FILES: Measured(9, 200, 2.0), MEMORY: Measured(9, 50, 1.0)}
    found = choose_method(Measurements(10, 100, ways, {BROADCAST: "nobody"}))
    assert found.expected == {FILES: 1.0, MEMORY: 2.0}
    assert found.method is FILES


def test_a_failed_method_is_retried_with_exponential_backoff():
    ages = [due_after(None, 1.0, failures) for failures in range(1, 8)]
    assert ages == [AGAIN, 2 * AGAIN, 4 * AGAIN, 8 * AGAIN, 16 * AGAIN, 16 * AGAIN, 16 * AGAIN]
    ways = {FILES: Measured(AGAIN, 100, 1.0), MEMORY: Measured(1, 100, None, 1)}
    for number, method in ((AGAIN, FILES), (AGAIN + 1, MEMORY)):
        assert choose_method(Measurements(number, 100, ways, {BROADCAST: "nobody"})).method is method


def test_a_method_that_became_faster_is_chosen_again():
    costs = {FILES: 1.0, MEMORY: 3.0}
    taken = simulated(
        lambda method, number: costs[method] if number < 100 else {FILES: 1.0, MEMORY: 0.1}[method], 200
    )
    assert taken[60:90].count(FILES) >= 29
    assert taken[-30:].count(MEMORY) >= 27


def test_a_method_with_a_small_gain_is_still_measured_again():
    taken = simulated(lambda method, _: {FILES: 1.0, MEMORY: 0.95}[method], 100)
    assert 3 <= taken.count(MEMORY) <= 2 + 100 // AGAIN


def simulated(cost, syncs, able=(FILES, MEMORY)):
    """Return the ways of so many syncs, each measured as `cost(method, number)` says."""
    ways, present, taken = {}, FILES, []
    lacking = {method: "it does not exist" for method in LACKING if method not in able}
    for number in range(1, syncs + 1):
        found = choose_method(Measurements(number, 100, dict(ways), lacking, present))
        present = present if found.is_trial else found.method
        ways[found.method] = Measured(number, 100, cost(found.method, number))
        taken.append(found.method)
    return taken


seconds = st.floats(0.001, 1000.0)
measured = st.builds(
    Measured,
    number=st.integers(0, 999),
    size=st.integers(0, 1 << 40),
    seconds=st.none() | seconds,
    failures=st.integers(0, 100),
)
methods = st.sampled_from(ORDER)


@given(
    size=st.integers(0, 1 << 40),
    ways=st.dictionaries(methods, measured),
    lacking=st.dictionaries(methods, st.text(min_size=1)),
    present=methods,
)
def test_every_choice_is_available_and_has_a_reason(size, ways, lacking, present):
    found = choose_method(Measurements(1000, size, ways, lacking, present))
    assert found.method is FILES or found.method not in lacking
    assert found.reason
    if not found.is_trial and found.method in found.expected:
        assert found.expected[found.method] * STICKS <= min(found.expected.values()) * (1 + 1e-9)


@settings(max_examples=40)
@example(costs={FILES: 1.0, MEMORY: 0.95, BROADCAST: 1.05})
@given(costs=st.fixed_dictionaries(dict.fromkeys(ORDER, seconds)))
def test_the_fastest_method_prevails_and_trials_of_others_cost_little(costs):
    syncs = 40 * AGAIN
    taken = simulated(lambda method, _: costs[method], syncs, ORDER)
    least = min(costs.values())
    settled = taken[len(ORDER) :]
    usual = [method for method in settled if costs[method] <= least / STICKS]
    assert len(usual) >= len(settled) * (1 - 2 / AGAIN)
    # Each other way costs at most two parts in AGAIN more, unless it is slower than is ever taken account of.
    paid = sum(min(costs[method], least * RARELY) for method in settled)
    assert paid <= least * len(settled) * (1 / STICKS + 2 * 2 / AGAIN)
    for method in ORDER:
        gaps = [number for number, one in enumerate(taken) if one is method]
        after = AGAIN * max(1, min(math.floor(costs[method] / least), RARELY))
        assert syncs - gaps[-1] <= 2 * after + 2
