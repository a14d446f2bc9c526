"""Pins: the name alone pins."""

from hypothesis import given
from hypothesis import strategies as st
from support.memory import memory_job

from syncd.protocol.layout import MAX_STEP, Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.request import Pin, pin_path, read_pins, remove_pin, write_pin


@given(st.dictionaries(st.integers(0, MAX_STEP), st.tuples(st.text(), st.floats(0, 2e9)), max_size=3))
def test_pins_round_trip(pins):
    job = memory_job()
    for step, (reason, at) in pins.items():
        write_pin(job, Pin(step, reason, at))
    assert read_pins(job) == {step: Pin(step, reason, at) for step, (reason, at) in pins.items()}


def test_removing_a_pin_twice_returns_false():
    job = memory_job()
    write_pin(job, Pin(7))
    assert remove_pin(job, 7)
    assert not remove_pin(job, 7)
    assert read_pins(job) == {}


@given(st.binary(max_size=60))
def test_a_damaged_pin_still_pins(data):
    job = memory_job()
    job.disk.files[pin_path(job, 7)] = data
    assert list(read_pins(job)) == [7]


def test_a_pin_of_a_newer_protocol_still_pins():
    job = memory_job({"/job/.syncd/pins/global_step_7.json": b'{"protocol":99}'})
    assert read_pins(job) == {7: Pin(7)}


def test_other_files_in_the_pins_directory_do_not_pin(tmp_path):
    job = Job.at(tmp_path, disk=LocalDisk())
    write_pin(job, Pin(7, "best"))
    pins = tmp_path / ".syncd" / "pins"
    for name in ("global_step_8", "global_step_09.json", ".global_step_8.json.0.tmp", "8.json", "notes.json"):
        (pins / name).write_bytes(b"")
    (pins / "global_step_8.json").mkdir()
    (pins / "global_step_9.json").symlink_to("nowhere")
    assert read_pins(job) == {7: Pin(7, "best")}
