"""The contract that every layout of steps that others wrote keeps."""

import os
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.foreign_jobs import SAMPLES, Sample, examine, put

from syncd.daemon.foreign import ForeignLayouts, step_of
from syncd.daemon.foreign.frameworks import LAYOUTS
from syncd.protocol.layout import MAX_STEP
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.step import Step, StepState


@pytest.fixture(params=SAMPLES, ids=lambda sample: sample.name)
def sample(request) -> Sample:
    return request.param


def look(root, sample: Sample, layouts: ForeignLayouts | None = None) -> Step | None:
    if layouts is None:
        return examine(LocalDisk(), str(root), sample.directory)
    return layouts.examine(LocalDisk(), str(root), sample.directory, step_of(sample.directory))


class Counting(LocalDisk):
    """A disk that counts what is read and can fail one path."""

    def __init__(self, fails: dict[str, OSError] | None = None) -> None:
        self.reads, self.fails = 0, fails or {}

    def read(self, path, limit=1 << 24):
        self.reads += 1
        return super().read(path, limit)

    def read_at(self, path, offset, length):
        self.reads += 1
        return super().read_at(path, offset, length)

    def stat(self, path):
        for end, error in self.fails.items():
            if path.endswith(end):
                raise error
        return super().stat(path)


def test_every_layout_has_a_sample():
    assert {sample.layout for sample in SAMPLES} == {layout.name for layout in LAYOUTS}


def test_a_complete_sample_step_is_complete(tmp_path, sample):
    path = sample.place(tmp_path)
    step = look(tmp_path, sample)
    assert step.state is StepState.COMPLETE, step.problem
    assert (step.layout, step.kind, step.payload) == (sample.layout, sample.kind, sample.payload)
    assert step.announced_by == sample.announced_by
    assert step.present == step.expected == len(sample.shards)
    assert step.size >= sum(os.stat(f"{path}/{name}").st_size for name in sample.shards)
    assert step.digest.startswith("sha256:")
    assert not step.problem
    assert not step.full


def test_an_empty_directory_is_not_complete(tmp_path, sample):
    sample.place(tmp_path, names=())
    step = look(tmp_path, sample)
    assert step is None or step.state is StepState.FILLING


def test_a_step_is_filling_until_its_last_file_arrives(tmp_path, sample):
    there = []
    for name, _ in sample.parts[:-1]:
        there.append(name)
        sample.place(tmp_path, there)
        step = look(tmp_path, sample)
        assert step.state is StepState.FILLING, (name, step)
        assert step.present == sum(name in sample.shards for name in there)
        assert step.expected in (None, len(sample.shards))
        assert step.problem
        assert step.digest == ""
    sample.place(tmp_path)
    assert look(tmp_path, sample).state is StepState.COMPLETE


def test_a_step_is_filling_for_any_order_of_its_shards(tmp_path, sample):
    """Also when everything else is there already, left by an earlier save or seen first by this host."""
    others = [name for name, _ in sample.parts if name not in sample.shards]
    for seed in range(3):
        order = list(sample.shards)
        random.Random(seed).shuffle(order)
        for count in range(len(order)):
            root = tmp_path / f"{seed}-{count}"
            sample.place(root, others + order[:count])
            step = look(root, sample)
            assert step is None or (step.state, step.present) == (StepState.FILLING, count), order[:count]


def test_a_truncated_file_is_filling(tmp_path, sample):
    """Whatever of a file is there so far is never complete, nor damaged: more of it may come."""
    path = sample.place(tmp_path)
    layouts = ForeignLayouts()
    for name, content in sample.parts:
        size = len("tinker://") if sample.layout == "tinker" else len(content)
        lengths = {0, 1, 4, 7, 8, 9, 30, size // 3, size // 2, size - 43, size - 22, size - 21, size - 1}
        for length in sorted(length for length in lengths if 0 <= length < size):
            put(f"{path}/{name}", content[:length])
            step = look(tmp_path, sample, layouts)
            assert step is None or step.state is StepState.FILLING, (name, length, step)
        put(f"{path}/{name}", content)
    assert look(tmp_path, sample).state is StepState.COMPLETE


def test_a_file_with_trailing_bytes_is_not_complete(tmp_path, sample):
    path = sample.place(tmp_path)
    for name in sample.shards:
        content = dict(sample.parts)[name]
        put(f"{path}/{name}", content + b" \0rest")
        assert look(tmp_path, sample).state is not StepState.COMPLETE
        put(f"{path}/{name}", content)


def test_a_rewrite_in_place_changes_the_fingerprint(tmp_path, sample):
    path = sample.place(tmp_path)
    for name in sample.shards:
        before = look(tmp_path, sample)
        stat = os.stat(f"{path}/{name}")
        put(f"{path}/{name}", dict(sample.parts)[name])
        os.utime(f"{path}/{name}", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
        after = look(tmp_path, sample)
        assert after.state is StepState.COMPLETE
        assert after.digest != before.digest


def test_a_replaced_file_changes_the_fingerprint(tmp_path, sample):
    """Also one with the size and time of the old one."""
    path = sample.place(tmp_path)
    name = f"{path}/{sample.shards[0]}"
    before, stat = look(tmp_path, sample), os.stat(name)
    put(f"{path}/new", dict(sample.parts)[sample.shards[0]])
    os.utime(f"{path}/new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.rename(f"{path}/new", name)
    assert look(tmp_path, sample).digest != before.digest


def test_an_unchanged_step_compares_equal(tmp_path, sample):
    sample.place(tmp_path)
    layouts = ForeignLayouts()
    seen = [
        layouts.examine(LocalDisk(), str(tmp_path), sample.directory, step_of(sample.directory)) for _ in "ab"
    ]
    assert seen[0] == seen[1] == look(tmp_path, sample)


def test_an_unchanged_step_is_not_read_again(tmp_path, sample):
    sample.place(tmp_path)
    layouts, disk = ForeignLayouts(), Counting()
    number = step_of(sample.directory)
    layouts.examine(disk, str(tmp_path), sample.directory, number)
    assert disk.reads
    disk.reads = 0
    assert layouts.examine(disk, str(tmp_path), sample.directory, number).state is StepState.COMPLETE
    assert disk.reads == 0


def test_a_full_checkpoint_keeps_its_fingerprint(tmp_path, sample):
    path = sample.place(tmp_path)
    before = look(tmp_path, sample)
    for name, content in sample.extras:
        put(f"{path}/{name}", content)
    after = look(tmp_path, sample)
    assert after.full
    assert after.digest == before.digest
    assert (after.state, after.payload) == (before.state, before.payload)


def test_linked_files_are_not_followed(tmp_path, sample):
    path = sample.place(tmp_path / "job")
    for name, content in sample.parts:
        put(f"{tmp_path}/elsewhere", content)
        os.unlink(f"{path}/{name}")
        os.symlink(f"{tmp_path}/elsewhere", f"{path}/{name}")
        step = look(tmp_path / "job", sample)
        assert step is None or step.state is not StepState.COMPLETE, name
        os.unlink(f"{path}/{name}")
        put(f"{path}/{name}", content)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "/" in s.shards[0]], ids=lambda sample: sample.name)
def test_linked_directories_are_not_followed(tmp_path, sample):
    path = sample.place(tmp_path / "job")
    name = sample.shards[0].partition("/")[0]
    os.rename(f"{path}/{name}", f"{tmp_path}/elsewhere")
    os.symlink(f"{tmp_path}/elsewhere", f"{path}/{name}")
    step = look(tmp_path / "job", sample)
    assert step is None or step.state is not StepState.COMPLETE


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_a_shard_must_be_a_regular_file(tmp_path, sample, make):
    path = sample.place(tmp_path)
    os.unlink(f"{path}/{sample.shards[-1]}")
    make(f"{path}/{sample.shards[-1]}")
    step = look(tmp_path, sample)
    assert step is None or step.state is not StepState.COMPLETE


def test_a_file_that_vanishes_during_the_scan_counts_as_missing(tmp_path, sample):
    sample.place(tmp_path)
    disk = Counting({sample.shards[0]: FileNotFoundError(2, "gone")})
    assert examine(disk, str(tmp_path), sample.directory).state is not StepState.COMPLETE


def test_a_file_system_error_during_the_scan_is_raised(tmp_path, sample):
    sample.place(tmp_path)
    disk = Counting({sample.shards[0]: OSError(5, "Input/output error")})
    with pytest.raises(OSError, match="Input/output"):
        examine(disk, str(tmp_path), sample.directory)


def test_steps_of_this_protocol_match_no_foreign_layout(tmp_path, sample):
    path = sample.place(tmp_path / "manifest")
    put(f"{path}/manifest.json", b"{}")
    assert look(tmp_path / "manifest", sample) is None
    path = sample.place(tmp_path / "receipts")
    os.makedirs(f"{path}/actor/.receipts")
    assert look(tmp_path / "receipts", sample) is None


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_content_never_raises(tmp_path, sample, data):
    path = sample.place(tmp_path)
    name, content = data.draw(st.sampled_from(sample.parts))
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        # Headers and ends are where the parsers look.
        far = data.draw(st.integers(0, min(200, max(0, len(changed) - 1))))
        if changed:
            changed[data.draw(st.sampled_from((far, -far - 1 if far < len(changed) else 0)))] ^= data.draw(
                st.integers(1, 255)
            )
    put(f"{path}/{name}", bytes(changed) if data.draw(st.booleans()) else data.draw(st.binary(max_size=300)))
    step = look(tmp_path, sample)
    assert step is None or step.state is StepState.COMPLETE or step.problem
    put(f"{path}/{name}", content)


JUNK = [
    "", ".", "..", "actor", "step_1/..", "global_step_", "global_step_01", "global_step_-1", "global_step_1 ",
    "global_step_1\n", "global_step_\n1", "global_step_\u0661", "global_step_1_2", "global_step_+1",
    "global_step_1e3", "Global_step_1", " global_step_1", "step_", "step_x", "step_007", "step_1.bak",
    "step_1\0", "xstep_1", "step_\u00b2", "step__1", "step_0x1", "checkpoint-", "checkpoint--1",
    "checkpoint-1-tmp", "checkpoint_1", "checkpoint-\uff11", "tmp-checkpoint-1", f"step_{MAX_STEP + 1}",
    f"checkpoint-{10**40}",
]  # fmt: skip


@pytest.mark.parametrize("name", JUNK, ids=ascii)
def test_other_directory_names_are_not_foreign_steps(name):
    assert step_of(name) is None
    assert examine(LocalDisk(), "/nowhere", name) is None


@given(st.integers(0, MAX_STEP))
@example(0)
@example(MAX_STEP)
def test_exact_step_names_are_foreign_steps(number):
    for prefix in ("global_step_", "step_", "checkpoint-"):
        assert step_of(f"{prefix}{number}") == number
        assert step_of(f"{prefix}0{number}") is None


@given(st.text(max_size=30))
def test_any_accepted_name_is_an_exact_step_name(name):
    for prefix in ("", "global_step_", "step_", "checkpoint-"):
        number = step_of(prefix + name)
        assert number is None or f"{prefix}{name}" in {
            f"global_step_{number}",
            f"step_{number}",
            f"checkpoint-{number}",
        }
