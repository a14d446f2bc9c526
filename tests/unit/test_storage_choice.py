"""How a step is stored, as a pure function: each reason for a whole one, and what is quicker."""

from dataclasses import replace

import pytest

from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence
from syncd.transports.delta.keyframes import chain_problem
from syncd.transports.delta.storage_choice import (
    ReaderTimes,
    StorageFacts,
    choose_storage,
    estimate,
    reader_seconds,
)
from syncd.transports.delta.storage_chooser import StorageChooser
from syncd.transports.files.storage import (
    ChainLength,
    Parent,
    ShareState,
    ShareTimes,
    StorageTimes,
    TimedBytes,
)
from syncd.transports.measured import AGAIN

MIB = 1 << 20
TIMES = ShareTimes(TimedBytes(100 * MIB, 1.0), TimedBytes(100 * MIB, 0.05), TimedBytes(MIB, 0.01))
"""Of one of two ranks on a mount of 200 MiB/s, with 1 % of changes."""

SHARE = ShareState((7, "a"), "", True, 100 * MIB, TIMES)
FACTS = StorageFacts((SHARE, SHARE), Parent(7, "sha256:0", (), ChainLength(1, 6, 12 * MIB)), readers=2)


def test_explorers_that_cannot_read_deltas_get_a_hint_and_their_absence_does_not():
    assert not choose_storage(replace(FACTS, readers=0)).hint
    assert 'stage = "/dev/shm/syncd"' in choose_storage(replace(FACTS, readers=0, unable="e0")).hint
    assert not choose_storage(replace(FACTS, unable="e0")).hint


def chosen(facts: StorageFacts) -> tuple[str, str]:
    found = choose_storage(facts)
    return found.form, found.why


def shares(**changed: object) -> StorageFacts:
    """Return the facts when one of the two ranks knows something else."""
    return replace(FACTS, shares=(SHARE, replace(SHARE, **changed)))


LARGE = TIMES._replace(container=TimedBytes(60 * MIB, 0.3))


@pytest.mark.parametrize(
    ("facts", "form", "why"),
    [
        (FACTS, "delta", "every explorer reads deltas"),
        (replace(FACTS, readers=0), "whole", "no living explorer reads deltas"),
        (replace(FACTS, parent=None, why_no_parent="step 7 is gone"), "whole", "step 7 is gone"),
        (shares(sealed=None, why="no room"), "whole", "no room"),
        (shares(sealed=(6, "b")), "whole", "different steps"),
        (shares(is_same_layout=False), "whole", "other headers"),
        (shares(times=LARGE), "whole", "more than 25%"),
        (shares(times=LARGE, encoded_ago=AGAIN), "shortcut", "16 steps ago"),
        (shares(times=ShareTimes()), "shortcut", "not known yet"),
        (replace(FACTS, must_be_whole="a full checkpoint"), "shortcut", "a full checkpoint"),
        (replace(FACTS, unable="old"), "shortcut", "explorer old reads no deltas"),
        (replace(FACTS, every=6), "shortcut", "6 deltas follow step 1"),
        (replace(FACTS, limit=10 * MIB), "shortcut", "more than 10485760 bytes"),
    ],
)
def test_each_reason_has_its_form(facts, form, why):
    assert chosen(facts)[0] == form
    assert why in chosen(facts)[1]
    assert choose_storage(facts).keeps is bool(facts.readers)


def test_a_chain_may_have_half_the_size_of_a_whole_step():
    assert chain_problem(ChainLength(1, 3, 50), 100) == ""
    assert chain_problem(ChainLength(1, 3, 51), 100) == "the deltas since step 1 have 50% of its size"


def test_times_follow_from_what_was_measured_by_hand():
    """200 MiB are written in 1 s. Two hosts read what they need through the same mount."""
    found = estimate((TIMES, TIMES), ReaderTimes(hosts=2))
    applied = 200 * MIB / 1.5e9 + 2 * 2 / 200
    assert found == pytest.approx((1.0 + 2.0, 1.0 + 0.01 + applied, 0.05 + 0.01 + applied))
    told = estimate((TIMES, TIMES), ReaderTimes(2, whole=0.5, changes=0.25))
    assert told == pytest.approx((1.5, 1.26, 0.31))
    assert estimate((TIMES, ShareTimes()), ReaderTimes()) is None


QUICK = ShareTimes(TimedBytes(100 * MIB, 0.02), TimedBytes(100 * MIB, 0.05), TimedBytes(MIB, 0.01))
"""A disk that takes 10 GiB/s: encoding takes longer than writing."""


def test_auto_stores_what_explorers_have_earlier():
    auto = replace(FACTS, weighs_time=True)
    assert chosen(auto)[0] == "delta"
    quick = replace(auto, shares=(replace(SHARE, times=QUICK),) * 2)
    assert chosen(quick) == ("whole", "explorers have whole weights earlier than changes")
    assert chosen(replace(quick, must_be_whole="checkpoint")) == ("whole", "checkpoint")
    again = replace(quick, shares=(replace(SHARE, times=QUICK, encoded_ago=AGAIN),) * 2)
    assert chosen(again)[0] == "shortcut", "it shows what changes take now"
    told = replace(quick, readers_times=ReaderTimes(1, whole=1.0, changes=0.1))
    assert chosen(told)[0] == "delta", "explorers say what they need"


def test_a_choice_stays_where_the_difference_may_be_noise():
    def form(was_slower, changes):
        facts = replace(FACTS, weighs_time=True, was_slower=was_slower)
        return choose_storage(replace(facts, readers_times=ReaderTimes(1, 1.0, changes))).form

    # Whole: 1 + 1 s. A delta: 0.06 s and what explorers need.
    assert form(True, 1.80) == "whole"
    assert form(True, 1.70) == "delta"
    assert form(False, 2.00) == "delta"
    assert form(False, 2.20) == "whole"


def test_what_an_explorer_s_presence_says_of_a_step():
    info = {"loaded": {"step": 7, "source": "stage", "seconds": 2}, "timings": {"stage": 1.5, "load": 0.5}}
    assert reader_seconds(info, 7) == 1.5
    assert reader_seconds(info, 8) is None
    assert reader_seconds({**info, "timings": {"load": 0.5}}, 7) is None
    assert reader_seconds({"loaded": "nonsense"}, 7) is None


def test_what_a_model_of_an_explorer_s_process_says_of_a_step():
    loaded = {"step": 7, "source": "files", "seconds": 9.0, "filled": 0.75}
    timings = {"prepare": 0.5, "load": 8.5}
    assert reader_seconds({"loaded": loaded, "timings": timings}, 7) == 0.75
    assert reader_seconds({"loaded": loaded, "timings": timings}, 8) is None
    del loaded["filled"]
    assert reader_seconds({"loaded": loaded, "timings": timings}, 7) is None


def test_the_slowest_model_of_a_process_replaces_what_was_assumed(tmp_path):
    def explorer(name, filled):
        loaded = {"step": 7, "source": "files", "seconds": 9.0, "filled": filled}
        return Presence(name, incarnation=name, host=name, info={"loaded": loaded, "timings": {"load": 9.0}})

    chooser = StorageChooser(Job.at(str(tmp_path)), None, 32, 0, weighs_time=True)
    assert chooser._readers_times([explorer("a", 0.5)]) == ReaderTimes(1), "it does not know step 7"
    for form, told in (("whole", (0.75, None)), ("delta", (0.75, 0.75))):
        chooser._forms = {7: form}
        assert chooser._readers_times([explorer("a", 0.5), explorer("b", 0.75)]) == ReaderTimes(2, *told)
    chooser.close()


def test_events_have_the_times_rounded():
    assert StorageTimes(1.23456, 2.0, 0.1).rounded() == {
        "whole_seconds": 1.235, "shortcut_seconds": 2.0, "delta_seconds": 0.1,
    }  # fmt: skip
