"""Decisions on hosts that fail or are slow: blame is slow to come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.parts.hosts.blame import (
    ABSENT,
    LEAST_BYTES,
    LEAST_SECONDS,
    RATE_LASTS,
    SETTLE,
    SLACK,
    STRIKES,
    STUCK,
    WINDOW,
    HostProgress,
    OriginRate,
    budget_of,
    fate_of,
    have_most_delivered,
    is_quick_alone,
    is_stuck,
    late_hosts,
    watched_for,
)

MB = 1_000_000
PROGRESS = st.builds(HostProgress, st.integers(0, 10**10), st.integers(0, 10**9), st.floats(0, 1000))
HOSTS = st.dictionaries(st.text(max_size=3), PROGRESS, max_size=8)
ELAPSED = st.floats(0, 1000)


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


def left_of(hosts):
    return sum(host.left for host in hosts.values())


@given(HOSTS, ELAPSED, st.integers(0, 10**11))
def test_nobody_is_late_at_the_beginning_of_what_it_was_asked_for(hosts, elapsed, more):
    late = late_hosts(hosts, left_of(hosts) + more, elapsed)
    assert all(hosts[name].asked_for >= SLACK + elapsed / 4 for name in late)


@given(HOSTS, ELAPSED, st.integers(0, 10**11))
def test_nobody_is_late_while_bytes_come_half_as_fast_as_they_did(hosts, elapsed, done):
    left = left_of(hosts)
    if (
        sum(host.recent for host in hosts.values()) * elapsed
        >= done * watched_for(left, left + done, elapsed) / 2
    ):
        assert not late_hosts(hosts, left + done, elapsed)


@pytest.mark.parametrize(
    ("left", "elapsed", "watched"),
    [
        (10, 9.0, SETTLE + 1.0),
        (50, 4.0, SETTLE + 4.0),
        (0, 9.0, SETTLE),
        (99, 60.0, WINDOW),
        (100, 1.0, WINDOW),
    ],
)
def test_hosts_are_watched_for_as_long_as_what_is_left_should_take(left, elapsed, watched):
    assert watched_for(left, 100, elapsed) == pytest.approx(watched)


@given(st.lists(PROGRESS, max_size=9))
def test_most_have_delivered_only_if_half_of_all_have(hosts):
    done = sum(host.left == 0 for host in hosts)
    assert have_most_delivered(hosts) == (len(hosts) > 0 and 2 * done >= len(hosts))


def test_the_only_host_that_has_a_step_is_never_late():
    assert not have_most_delivered([HostProgress(20 * MB, MB, 99.0)])


@given(HOSTS, ELAPSED, st.integers(0, 10**11))
def test_a_late_host_keeps_less_than_it_has_to_deliver(hosts, elapsed, done):
    for name, keep in late_hosts(hosts, left_of(hosts) + done, elapsed).items():
        assert 0 <= keep < hosts[name].left


def test_a_host_at_a_tenth_is_late_as_soon_as_the_others_are_done_and_one_that_ends_soon_is_not():
    hosts = {
        "done": HostProgress(0, MB, 10.0),
        "slow": HostProgress(10 * MB, MB // 10, 10.0),
        "soon": HostProgress(MB // 10, MB // 10, 10.0),
    }
    watched = SETTLE + 10.0 * 10.1 / 89.9
    assert late_hosts(hosts, 100 * MB, 10.0) == {"slow": int(MB / 10 * (watched - SETTLE) / watched)}


def test_nobody_is_late_while_the_file_system_or_the_host_itself_is_what_is_slow():
    def hosts(recent):
        return {"a": HostProgress(5 * MB, recent, 10.0), "b": HostProgress(5 * MB, recent, 10.0)}

    watched = SETTLE + 10.0 / 9
    assert not late_hosts(hosts(int(9 * MB * watched / 4) + 1), 100 * MB, 10.0)
    assert not late_hosts(hosts(int(9 * MB * watched / 4) - 9), 100 * MB, 10.0)  # it ends within SLACK anyway
    assert late_hosts(hosts(MB), 100 * MB, 10.0).keys() == {"a", "b"}


def test_whom_a_piece_was_moved_to_has_time_to_read_it():
    hosts = {"next": HostProgress(5 * MB, 0, SLACK + 2.4)}
    assert not late_hosts(hosts, 100 * MB, 10.0)
    assert late_hosts({"next": HostProgress(5 * MB, 0, SLACK + 2.5)}, 100 * MB, 10.0)


def test_large_files_that_are_one_piece_have_more_time():
    hosts = {"h": HostProgress(20 * MB, 3 * MB, 30.0)}
    assert late_hosts(hosts, 100 * MB, 30.0)
    assert not late_hosts(hosts, 100 * MB, 30.0, is_coarse=True)


def test_a_host_reads_what_is_missing_once_nothing_comes_from_anywhere():
    assert not is_stuck(STUCK - 0.1)
    assert is_stuck(STUCK)
    assert not is_stuck(STUCK, is_coarse=True)


def test_reading_alone_is_chosen_only_where_it_was_measured_to_be_quick():
    assert not is_quick_alone(1, None)
    assert is_quick_alone(299 * MB, 100.0 * MB)
    assert not is_quick_alone(301 * MB, 100.0 * MB)


@pytest.mark.parametrize(
    ("size", "seconds"), [(LEAST_BYTES - 1, 9.0), (100 * MB, LEAST_SECONDS / 2), (0, 0.0)]
)
def test_a_small_share_measures_nothing(size, seconds):
    rate = OriginRate()
    rate.note(size, seconds)
    assert rate.known is None


def test_a_rate_is_forgotten_unless_it_is_measured_again():
    now = [5.0]
    rate = OriginRate(lambda: now[0])
    rate.note(200 * MB, 2.0)
    now[0] += RATE_LASTS - 1
    rate.note(1, 9.0)
    assert rate.known == 100 * MB
    now[0] += 1
    assert rate.known is None


def test_the_budget_is_a_quarter_more_than_the_share():
    assert budget_of(1000) == 1250
