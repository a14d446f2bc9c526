"""Decisions on hosts that fail or are slow: blame is slow to come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.parts.hosts.judgement import (
    ABSENT,
    SETTLE,
    SLACK,
    STRIKES,
    STUCK,
    HostProgress,
    budget_of,
    fate_of,
    have_most_delivered,
    is_quick_alone,
    is_stuck,
    late_hosts,
)

MB = 1_000_000
PROGRESS = st.builds(HostProgress, st.integers(0, 10**10), st.integers(0, 10**9))


@pytest.mark.parametrize("failure", ["refused", "wrong", "denied"])
def test_a_host_that_refuses_lies_or_takes_another_token_is_asked_nothing_more(failure):
    assert fate_of(failure, 0, 0.0) == "remove"


@pytest.mark.parametrize("failure", ["late", "lost"])
def test_a_time_out_moves_one_piece_and_three_in_a_row_remove_the_host(failure):
    assert [fate_of(failure, strikes, 0.0) for strikes in range(1, STRIKES + 1)] == ["move", "move", "remove"]


def test_a_host_that_has_not_begun_is_waited_for_and_a_piece_on_its_way_is_no_fault():
    assert fate_of("absent", 0, ABSENT - 0.1) == "wait"
    assert fate_of("absent", 0, ABSENT) == "remove"
    assert fate_of("busy", 99, 99.0) == "wait"


@given(
    st.dictionaries(st.text(max_size=3), PROGRESS, max_size=8),
    st.floats(0, 1000),
    st.floats(0, SETTLE, exclude_max=True),
)
def test_nobody_is_late_at_the_beginning(hosts, elapsed, calm_for):
    assert late_hosts(hosts, elapsed, calm_for, MB) == {}


@given(st.lists(PROGRESS, max_size=9), st.booleans())
def test_most_have_delivered_only_if_half_of_all_have(hosts, has_share):
    done = has_share + sum(host.left == 0 for host in hosts)
    count = len(hosts) + has_share
    assert have_most_delivered(hosts, has_share=has_share) == (count > 0 and 2 * done >= count)


def test_the_only_host_that_has_a_step_is_never_late():
    assert not have_most_delivered([HostProgress(20 * MB, MB)], has_share=False)


@given(
    st.dictionaries(st.text(max_size=3), PROGRESS, max_size=8), st.floats(0, 1000), st.floats(SETTLE, 1000)
)
def test_a_late_host_keeps_less_than_it_has_to_deliver(hosts, elapsed, calm_for):
    for name, keep in late_hosts(hosts, elapsed, calm_for, MB).items():
        assert 0 <= keep < hosts[name].left


def test_a_host_at_a_tenth_is_late_and_one_that_ends_soon_is_not():
    hosts = {"slow": HostProgress(20 * MB, MB), "soon": HostProgress(2 * MB, 3 * MB)}
    late = late_hosts(hosts, 10.0, 3.0, MB // 10)
    assert late == {"slow": int((SLACK + 1.0) * MB / 3)}


def test_nobody_is_late_while_the_file_system_is_what_is_slow():
    hosts = {"a": HostProgress(20 * MB, 3 * MB), "b": HostProgress(20 * MB, 3 * MB)}
    assert late_hosts(hosts, 10.0, 3.0, MB // 10).keys() == {"a", "b"}
    assert not late_hosts(hosts, 10.0, 3.0, MB // 10, origin=4.0 * MB)
    assert late_hosts(hosts, 10.0, 3.0, MB // 10, origin=5.0 * MB)


def test_large_files_that_are_one_piece_have_more_time():
    hosts = {"h": HostProgress(20 * MB, 3 * MB)}
    assert late_hosts(hosts, 30.0, 3.0, MB)
    assert not late_hosts(hosts, 30.0, 3.0, MB, is_coarse=True)


def test_a_host_reads_what_is_missing_once_nothing_comes_from_anywhere():
    assert not is_stuck(STUCK - 0.1)
    assert is_stuck(STUCK)
    assert not is_stuck(STUCK, is_coarse=True)


def test_reading_alone_is_chosen_only_where_it_was_measured_to_be_quick():
    assert not is_quick_alone(1, None)
    assert is_quick_alone(299 * MB, 100.0 * MB)
    assert not is_quick_alone(301 * MB, 100.0 * MB)


def test_the_budget_is_a_quarter_more_than_the_share():
    assert budget_of(1000) == 1250
