"""Into an object store: the order of writes, kills at each of them, two mirrors, rewinds, retention."""

import shutil
from dataclasses import replace

import pytest
from support.mirrors import KilledError, MemoryObjects, Push, kill_at

from syncd.errors import StorageError, TryAgainError
from syncd.parts.mirror.index import NAME, decode_index
from syncd.parts.mirror.links import key_of
from syncd.parts.mirror.store import PART, StoreSource, object_names
from syncd.protocol.manifest import read_manifest
from syncd.protocol.receipt import FileRecord
from syncd.protocol.version import encode_version


def index_of(objects):
    return decode_index(objects.objects[NAME][0], NAME)


def keys(objects):
    return {name.split("/")[1] for name in objects.objects if name.startswith("steps/")}


def key(trainer, step):
    return key_of(step, read_manifest(trainer.job.disk, trainer.job.step(step)).digest)


def assert_whole(objects):
    """Every step that the index names has all bytes, by a reader of its own, and so has its chain."""
    index, source = index_of(objects), StoreSource(objects, part=64 << 10)
    source.newest()
    for stored in index.steps.values():
        step, digest = stored.key.split("-")
        link = source.link(int(step), f"x:{digest}")
        assert link is not None, stored
        assert stored.parent == "" or stored.parent in index.steps
        for record in link.records:
            assert len(source.read(link, record, 0, record.size)) == record.size, (stored, record)


def test_parents_come_before_children_files_before_the_manifest_and_the_version_last(trainer):
    trainer.model(1)
    trainer.delta(2, 1)
    trainer.delta(3, 2)
    objects = MemoryObjects()
    Push(trainer.job, objects).run()
    written = [name for what, name in objects.calls if what in ("put", "create", "replace")]
    seals = [name for name in written if name.endswith("manifest.json")]
    assert seals == [f"steps/{key(trainer, step)}/manifest.json" for step in (1, 2, 3)]
    for seal in seals:
        files = [name for name in written if name.startswith(seal.removesuffix("manifest.json"))]
        assert files[-1] == seal
        assert len(files) > 1
    assert written[-1] == NAME
    assert written.count(NAME) == 1
    assert index_of(objects).pair == trainer.pair
    assert_whole(objects)


def test_a_second_run_writes_nothing_and_an_idle_iteration_asks_the_store_nothing(trainer):
    trainer.keyframe(1)
    objects = MemoryObjects()
    Push(trainer.job, objects).run()
    before = len(objects.calls)
    push = Push(trainer.job, objects)
    push.run()
    assert objects.calls[before:] == [("get", NAME)]
    push.run()
    assert len(objects.calls) == before + 1


def test_small_steps_are_not_listed_once_this_process_has_published_and_no_copy_of_it_has_failed(trainer):
    trainer.keyframe(1)
    objects, left = MemoryObjects(), [-1]

    def fail(what, _):
        left[0] -= 1
        if left[0] == 0:
            raise StorageError("the object store does not answer")

    push = Push(trainer.job, objects.sharing(fail))

    def lists_of_next(step):
        before = len(objects.calls)
        trainer.keyframe(step)
        push.run()
        return [name for what, name in objects.calls[before:] if what == "list" and name != "steps/"]

    push.run()
    assert lists_of_next(2) == []
    left[0] = 2  # its second file
    with pytest.raises(StorageError):
        lists_of_next(3)
    assert len(lists_of_next(4)) == 1
    assert lists_of_next(5) == []
    assert_whole(objects)


def test_a_kill_at_each_write_leaves_a_whole_version_or_none_and_the_next_run_sends_nothing_twice(trainer):
    trainer.model(1)
    trainer.delta(2, 1)
    undisturbed = MemoryObjects()
    Push(trainer.job, undisturbed).run()
    writes = [name for what, name in undisturbed.calls if what in ("put", "create", "replace")]
    for count in range(1, len(writes) + 1):
        objects = MemoryObjects()
        killed = Push(trainer.job, objects.sharing(kill_at(count)))
        with pytest.raises(KilledError):
            killed.run()
        assert (NAME in objects.objects) is False
        before = len(objects.calls)
        Push(trainer.job, objects).run()
        done = {name for what, name in objects.calls[:before] if what in ("put", "create")}
        again = [name for what, name in objects.calls[before:] if what in ("put", "create")]
        assert not done.intersection(again), count
        assert objects.objects.keys() == undisturbed.objects.keys()
        assert_whole(objects)


def test_another_mirror_runs_to_its_end_at_each_write_of_a_paused_one(trainer):
    trainer.model(1)
    trainer.delta(2, 1)
    first = MemoryObjects()
    Push(trainer.job, first).run()
    count = sum(what in ("put", "create", "replace") for what, _ in first.calls)
    for pause in range(1, count + 1):
        objects, left = MemoryObjects(), [pause]

        def other(*_, objects=objects, left=left):
            left[0] -= 1
            if left[0] == 0:
                Push(trainer.job, objects).run()

        Push(trainer.job, objects.sharing(other)).run()
        assert index_of(objects).pair == trainer.pair
        assert [past.step for past in index_of(objects).history] == [2]
        assert_whole(objects)


def test_a_paused_mirror_never_takes_the_version_back(trainer):
    trainer.keyframe(1)
    objects = MemoryObjects()
    pairs = []

    def advance(what, name):
        if name == NAME and not pairs:
            pairs.append(trainer.pair)
            trainer.keyframe(2)
            Push(trainer.job, objects).run()
            pairs.append(index_of(objects).pair)

    push = Push(trainer.job, objects.sharing(advance))
    push.run()
    assert pairs == [(1, 1), (1, 2)]
    assert index_of(objects).pair == (1, 2)
    assert_whole(objects)


def test_a_mirror_that_is_behind_copies_the_newest_chain_alone(trainer):
    trainer.model(1)
    trainer.delta(2, 1)
    trainer.model(3)
    trainer.delta(4, 3)
    objects = MemoryObjects()
    Push(trainer.job, objects).run()
    assert keys(objects) == {key(trainer, 3), key(trainer, 4)}


def test_a_step_that_was_written_again_is_another_name_and_a_rollback_a_higher_pair(trainer):
    for step in (1, 2, 3):
        trainer.keyframe(step)
    objects = MemoryObjects()
    push = Push(trainer.job, objects, keep=10)
    push.run()
    old = key(trainer, 3)
    trainer.rewind(1)
    push.run()
    assert index_of(objects).pair == (2, 1)
    trainer.keyframe(2, salt=90)
    trainer.keyframe(3, salt=91)
    push.run()
    assert index_of(objects).pair == (2, 3)
    assert {old, key(trainer, 3)} <= keys(objects)
    assert_whole(objects)


def test_what_is_removed_at_the_source_in_the_middle_is_decided_anew(trainer):
    trainer.model(1)
    trainer.delta(2, 1)
    objects = MemoryObjects()
    push = Push(trainer.job, objects)
    push.mirror.turn()  # the keyframe
    shutil.rmtree(trainer.job.step(2))
    with pytest.raises(TryAgainError, match="step 2 of the source was removed"):
        push.run()
    trainer.keyframe(3)
    push.run()
    assert index_of(objects).pair == trainer.pair
    assert_whole(objects)


def test_the_source_keeps_what_is_being_copied(trainer):
    for step in (1, 2):
        trainer.keyframe(step)

    def train_on(what, _):
        if what == "create" and trainer.pair == (1, 2):
            for step in range(3, 9):
                trainer.keyframe(step)
            assert trainer.job.disk.list(trainer.job.step(2))

    objects = MemoryObjects()
    Push(trainer.job, objects.sharing(train_on)).run()
    assert index_of(objects).pair == (1, 8)
    assert [past.step for past in index_of(objects).history] == [2, 8]


def test_retention_keeps_the_newest_versions_with_their_chains_and_what_a_reader_may_have_begun(trainer):
    objects = MemoryObjects()
    push = Push(trainer.job, objects, keep=2, grace=100.0)
    trainer.model(1)
    push.run()
    for step in (2, 3, 4, 5):
        objects.at += 30.0
        trainer.delta(step, step - 1) if step != 4 else trainer.model(4)
        push.run()
    assert [past.step for past in index_of(objects).history] == [1, 2, 3, 4, 5]
    for step in (6, 7, 8):
        objects.at += 300.0
        trainer.delta(step, step - 1)
        push.run()
    index = index_of(objects)
    # 6 was the newest until 7 came, which the store dates by what it was when 8 came.
    assert [past.step for past in index.history] == [6, 7, 8]
    assert sorted(int(name.partition("-")[0]) for name in keys(objects)) == [4, 5, 6, 7, 8]
    assert index.removing == ()
    assert_whole(objects)


def test_a_kill_at_each_deletion_leaves_what_is_named_whole_and_the_next_run_finishes(trainer):
    for step in (1, 2, 3):
        trainer.keyframe(step)
        trainer.job.disk.stat(trainer.job.step(step))

    def fill(before=lambda *_: None):
        objects = MemoryObjects()
        clients = objects.sharing(before)
        push = Push(trainer.job, clients, keep=1, grace=0.0)
        return objects, push

    steps = iter(range(4, 1000))
    for count in range(1, 9):
        objects, push = fill()
        push.run()
        objects.at += 500.0
        trainer.keyframe(next(steps))
        push.run()
        objects.at += 500.0
        trainer.keyframe(next(steps))
        killer = Push(trainer.job, objects.sharing(kill_at(count)), keep=1, grace=0.0)
        try:
            killer.run()
        except KilledError:
            assert_whole(objects)
        objects.at += 500.0
        trainer.keyframe(next(steps))
        Push(trainer.job, objects, keep=1, grace=0.0).run()
        objects.at += 500.0
        trainer.keyframe(next(steps))
        Push(trainer.job, objects, keep=1, grace=0.0).run()
        assert_whole(objects)
        # What was sealed and never named goes with the sweep of a day.
        objects.at += 200_000.0
        trainer.keyframe(next(steps))
        Push(trainer.job, objects, keep=1, grace=0.0).run()
        named = index_of(objects)
        assert keys(objects) == set(named.steps) | set(named.removing)
        assert len(keys(objects)) <= 2


def test_another_job_in_the_same_prefix_is_refused(trainer):
    trainer.keyframe(1)
    objects = MemoryObjects()
    Push(trainer.job, objects, "job-a").run()
    with pytest.raises(TryAgainError, match="another job"):
        Push(trainer.job, objects, "job-b").run()


def test_a_source_whose_versions_began_anew_is_refused(trainer):
    trainer.keyframe(5)
    objects = MemoryObjects()
    push = Push(trainer.job, objects)
    push.run()
    trainer.job.disk.unlink(trainer.job.version)
    trainer.daemon.close()
    index = index_of(objects)
    assert index.pair == (1, 5)
    version = index.version
    trainer.job.disk.replace(trainer.job.version, encode_version(replace(version, step=4)))
    with pytest.raises(TryAgainError, match="began anew"):
        push.run()


def test_a_large_file_lies_in_parts_whose_names_follow_from_its_size():
    def names(size):
        return object_names(FileRecord("actor/a", size, "xxh3_128:00", 0), PART)

    assert names(PART) == [("actor/a", 0, PART)]
    assert names(PART + 1) == [
        (f"actor/a.parts/{0:014d}", 0, PART),
        (f"actor/a.parts/{PART:014d}", PART, 1),
    ]
