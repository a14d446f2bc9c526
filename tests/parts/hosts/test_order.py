"""The order of hosts: balanced, the same everywhere, and without hosts that are lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from syncd.parts.hosts.order import next_host, order_of

MEMBERS = st.lists(st.integers(0, 999).map("h{:03d}".format), min_size=1, max_size=40, unique=True).map(
    sorted
)
NUMBERS = st.integers(0, 200_000)


@given(MEMBERS, NUMBERS)
def test_an_order_has_each_host_once(members, number):
    assert sorted(order_of(number, members)) == members


@given(MEMBERS, st.integers(0, 2000))
def test_all_hosts_own_the_same_number_of_pieces_but_for_one(members, count):
    owned = Counter(order_of(number, members)[0] for number in range(count))
    shares = [owned[member] for member in members]
    assert max(shares) - min(shares) <= 1


@given(st.integers(2, 32), st.data())
def test_the_pieces_of_a_lost_host_are_spread_over_all_others(count, data):
    members = [f"h{number:02d}" for number in range(count)]
    lost = data.draw(st.sampled_from(members))
    rounds = 4 * (count - 1)
    owned = [number for number in range(rounds * count) if order_of(number, members)[0] == lost]
    following = Counter(next_host(number, members, {lost}, set(), 3) for number in owned)
    assert set(following) == set(members) - {lost}
    assert max(following.values()) <= 4


@given(MEMBERS, NUMBERS, st.data())
def test_who_is_asked_was_neither_removed_nor_asked_in_vain(members, number, data):
    removed, vain = (set(data.draw(st.lists(st.sampled_from(members), unique=True))) for _ in range(2))
    host = next_host(number, members, removed, vain, 3)
    assert host not in removed | vain
    assert (host is None) == (len(vain - removed) >= 3 or removed | vain >= set(members))


@given(MEMBERS, NUMBERS, st.data())
def test_whoever_is_late_or_lost_all_that_know_it_ask_the_same_host_next(members, number, data):
    """A host that was asked in vain and then removed counts as one that was removed at once."""
    lost = set(data.draw(st.lists(st.sampled_from(members), unique=True, max_size=2)))
    nexts = {
        next_host(number, members, lost - late, late, 3)
        for late in (set(data.draw(st.lists(st.sampled_from(members), unique=True))) & lost for _ in range(3))
    }
    assert len(nexts) == 1


@given(MEMBERS, NUMBERS)
def test_hosts_with_the_same_list_agree_whoever_computes(members, number):
    assert order_of(number, list(members)) == order_of(number, tuple(members))
