"""The harness of whole jobs: a program that fails ends the others at once, whichever is waited for."""

import pytest
from support import whole_jobs

FOREVER = ("-c", "import threading; threading.Event().wait()")


@pytest.mark.parametrize("order", [1, -1])
def test_one_that_fails_ends_the_others_with_what_it_said(tmp_path, order):
    commands = {"waits": FOREVER, "fails": ("-c", "raise SystemExit('what it lacks')")}
    with pytest.raises(AssertionError, match="what it lacks"):
        whole_jobs.run_together(tmp_path, dict(list(commands.items())[::order]), 250)


def test_programs_that_wait_for_each_other_for_ever_are_ended(tmp_path):
    with pytest.raises(AssertionError, match="no end"):
        whole_jobs.run_together(tmp_path, {"one": FOREVER, "other": FOREVER}, 0.5)


def test_programs_that_end_well_are_waited_for(tmp_path):
    write = "from pathlib import Path; Path('{}').touch()"
    whole_jobs.run_together(tmp_path, {name: ("-c", write.format(name)) for name in "ab"}, 250)
    assert {"a", "b"} <= {path.name for path in tmp_path.iterdir()}
