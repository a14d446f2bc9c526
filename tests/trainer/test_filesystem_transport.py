"""One contract for both modes and all ways of writing: what is saved is a whole step that loads as it is."""

import contextlib
import errno
import itertools
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from support.saving import absent, config_of, index_of, load, log_probs, new_job, temporaries, tiny, whole  # noqa: E402

from syncd.errors import NonFiniteError, StorageError, SyncdError, TimedOutError, UsageError  # noqa: E402
from syncd.protocol.writer import StepWriter  # noqa: E402
from syncd.transports.files import shard as shard_module  # noqa: E402
from syncd.transports.files.buffers import TensorCopies  # noqa: E402
from syncd.transports.files.save_outcome import SaveFailedError  # noqa: E402
from syncd.transports.files.shard import BUFFERED, DIRECT, PIECE, UNCACHED, NewFile, find_write_mode  # noqa: E402
from syncd.transports.files.step_saver import StepSaver  # noqa: E402

MODES = ["background", "stream"]
WAYS = [DIRECT, UNCACHED, BUFFERED]
attempts = map("attempt-{}".format, itertools.count())


@pytest.fixture
def job(tmp_path):
    return new_job(tmp_path / "job")


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request, tmp_path):
    """Return each way of writing that this mount takes."""
    if find_write_mode(str(tmp_path), [request.param]) is not request.param:
        pytest.skip(f"{request.param.name} writes are refused here")
    return request.param


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def save(saver, step, tensors, companions=None):
    saver.save(step, next(attempts), tensors, companions)
    saver.wait()


def odd_tensors():
    """Return tensors whose lengths and dtypes are as awkward as the format allows."""
    return [
        ("flag", torch.tensor([True, False, True])),
        ("wide", torch.randn(5, 3, dtype=torch.float64)),
        ("half", torch.randn(7).to(torch.float16)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 4)),
        ("brain", torch.randn(3, 11).to(torch.bfloat16)),
        ("turned", torch.randn(6, 10).t()),
        ("count", torch.tensor([7], dtype=torch.int64)),
        ("large", torch.randn(PIECE // 4 + 1023)),
        ("byte", torch.arange(5, dtype=torch.uint8)),
    ]


class TestContract:
    def test_a_saved_step_is_whole_and_has_equal_tensors(self, job, mode, way):
        tensors = odd_tensors()
        saver = StepSaver(job, 0, 1, mode=mode, dtype=None, write_mode=way)
        save(saver, 3, tensors)
        manifest = whole(job, 3)
        assert [record.name for record in manifest.shards] == ["actor/model-00001-of-00001.safetensors"]
        found = load(job, 3)
        assert found.keys() == dict(tensors).keys()
        for name, tensor in tensors:
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        saver.close()

    def test_all_modes_write_the_same_bytes(self, job):
        digests = set()
        for step, (mode, way) in enumerate(itertools.product(MODES, [find_write_mode(job.root), BUFFERED])):
            torch.manual_seed(0)
            save(StepSaver(job, 0, 1, mode=mode, write_mode=way), step, odd_tensors())
            digests.add(whole(job, step).shards[0].digest)
        assert len(digests) == 1

    def test_the_cast_matches_torch_and_leaves_integers_alone(self, job, mode):
        weight, whole_number = torch.randn(33, 5), torch.arange(4)
        save(StepSaver(job, 0, 1, mode=mode), 0, [("w", weight), ("n", whole_number)])
        found = load(job, 0)
        assert torch.equal(found["w"], weight.to(torch.bfloat16))
        assert torch.equal(found["n"], whole_number)

    def test_file_permissions_follow_the_umask(self, job, mode, way):
        before = os.umask(0o027)
        try:
            save(StepSaver(job, 0, 1, mode=mode, write_mode=way), 0, [("w", torch.ones(4))])
        finally:
            os.umask(before)
        shard = f"{job.step(0)}/actor/model-00001-of-00001.safetensors"
        assert stat.S_IMODE(os.stat(shard).st_mode) == 0o640
        assert os.listdir(f"{job.step(0)}/actor/.receipts") == ["00001-of-00001.json"]
        assert not temporaries(job, 0)

    @pytest.mark.parametrize("kind", ["qwen2", "llama"])
    @pytest.mark.parametrize("tie", [False, True])
    def test_transformers_loads_a_saved_directory_as_it_is(self, job, mode, kind, tie):
        transformers = pytest.importorskip("transformers", reason="needs transformers")
        model = tiny(tie, kind)
        save(StepSaver(job, 0, 1, mode=mode), 1, model.state_dict().items(), config_of(model))
        actor = f"{job.step(1)}/actor"
        cast = tiny(tie, kind)
        cast.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
        loaded = transformers.AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32).eval()
        assert torch.equal(log_probs(loaded), log_probs(cast))
        assert (log_probs(loaded) - log_probs(model)).abs().max() < 0.05
        assert ("lm_head.weight" in index_of(job, 1)["weight_map"]) is not tie

    def test_the_index_names_every_tensor_and_the_total_size(self, job, mode):
        save(
            StepSaver(job, 0, 1, mode=mode, tied=["again"]),
            0,
            [("w", torch.ones(8)), ("again", torch.ones(8))],
        )
        index = index_of(job, 0)
        assert index["weight_map"] == {"w": "model-00001-of-00001.safetensors"}
        assert index["metadata"]["total_size"] == 16

    def test_consecutive_saves_write_their_own_weights(self, job, mode):
        saver = StepSaver(job, 0, 1, mode=mode)
        for step in range(4):
            save(saver, step, [("w", torch.full((1000, 10), float(step)))])
            whole(job, step)
            assert load(job, step)["w"].unique().item() == step


class TestExport:
    def test_reused_buffers_are_not_taken_for_tied(self, job, mode):
        buffer = torch.empty(64)

        def export():
            for number in range(3):
                yield f"w{number}", buffer.fill_(number)

        save(StepSaver(job, 0, 1, mode=mode), 0, export)
        assert {name: tensor[0].item() for name, tensor in load(job, 0).items()} == {
            "w0": 0,
            "w1": 1,
            "w2": 2,
        }

    def test_background_mode_accepts_a_one_shot_iterator(self, job):
        save(StepSaver(job, 0, 1), 0, iter([("w", torch.ones(4))]))
        whole(job, 0)

    def test_stream_mode_refuses_a_one_shot_iterator(self, job):
        with pytest.raises(UsageError, match="walked twice"):
            StepSaver(job, 0, 1, mode="stream").save(0, "a", iter([("w", torch.ones(4))]))

    def test_stream_mode_refuses_a_changed_model_and_then_recovers(self, job):
        saver = StepSaver(job, 0, 1, mode="stream")
        save(saver, 0, [("w", torch.ones(4))])
        with pytest.raises(UsageError, match="changed"):
            save(saver, 1, [("w", torch.ones(5))])
        assert absent(job, 1)
        save(saver, 1, [("w", torch.ones(5))])
        whole(job, 1)

    @pytest.mark.parametrize(
        "tensors",
        [[], [("w", torch.ones(2)), ("w", torch.ones(2))], [("__metadata__", torch.ones(2))]],
        ids=["none", "twice", "reserved"],
    )
    def test_empty_duplicate_and_reserved_tensor_names_are_refused(self, job, mode, tensors):
        with pytest.raises(UsageError):
            save(StepSaver(job, 0, 1, mode=mode), 0, tensors)
        assert absent(job, 0)

    @pytest.mark.fault("the final save rewrites an advertised step in place")
    def test_a_sealed_step_is_never_rewritten(self, job, mode):
        saver = StepSaver(job, 0, 1, mode=mode)
        save(saver, 0, [("w", torch.ones(4))])
        before = whole(job, 0)
        with pytest.raises(UsageError, match="complete already"):
            save(saver, 0, [("w", torch.zeros(4))])
        assert whole(job, 0) == before


class TestFailure:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, None])
    def test_non_finite_weights_are_refused_by_name(self, job, mode, bad, dtype):
        weight = torch.ones(3000)
        weight[1234] = bad
        saver = StepSaver(job, 0, 1, mode=mode, dtype=dtype)
        with pytest.raises(NonFiniteError, match=r"'layer\.bad'"):
            save(saver, 0, [("layer.good", torch.ones(999)), ("layer.bad", weight)])
        assert absent(job, 0)
        assert not temporaries(job, 0)

    def test_the_largest_finite_values_are_accepted(self, job, mode):
        for step, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32, torch.float64]):
            limits = torch.finfo(dtype)
            save(
                StepSaver(job, 0, 1, mode=mode, dtype=None),
                step,
                [("w", torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype))],
            )
            whole(job, step)

    def test_the_finite_check_can_be_switched_off(self, job, mode):
        save(StepSaver(job, 0, 1, mode=mode, check_finite=False), 0, [("w", torch.tensor([float("nan")]))])
        whole(job, 0)

    def test_a_full_disk_leaves_no_step_and_the_next_save_succeeds(self, job, mode, monkeypatch):
        _fail_writes(monkeypatch, errno.ENOSPC)
        saver = StepSaver(job, 0, 1, mode=mode, write_mode=BUFFERED)
        with pytest.raises(StorageError, match="No space left"):
            save(saver, 0, [("w", torch.ones(4096))])
        assert absent(job, 0)
        assert not temporaries(job, 0)
        monkeypatch.undo()
        save(saver, 0, [("w", torch.ones(4096))])
        whole(job, 0)

    def test_a_background_error_is_raised_by_the_next_save(self, job, monkeypatch):
        _fail_writes(monkeypatch, errno.EIO)
        saver = StepSaver(job, 0, 1, write_mode=BUFFERED)
        saver.save(0, "a", [("w", torch.ones(4))])
        with pytest.raises(StorageError):
            saver.save(1, "b", [("w", torch.ones(4))])
        monkeypatch.undo()
        save(saver, 1, [("w", torch.ones(4))])
        assert absent(job, 0)
        whole(job, 1)

    def test_a_missing_job_directory_is_not_created(self, tmp_path, mode):
        job = new_job(tmp_path / "job")
        os.rmdir(job.root)
        with pytest.raises(StorageError):
            save(StepSaver(job, 0, 1, mode=mode), 0, [("w", torch.ones(4))])
        assert not os.path.exists(job.root)

    @pytest.mark.fault("a failed background save hangs everybody")
    def test_a_failed_rank_fails_the_save_on_all_ranks(self, job, mode, monkeypatch):
        tensors = [("a", torch.ones(64)), ("b", torch.full((64,), float("nan")))]
        savers = [StepSaver(job, rank, 2, mode=mode, timeout=60) for rank in range(2)]
        errors = _together(savers, tensors)
        assert isinstance(errors[1], NonFiniteError)
        assert isinstance(errors[0], SaveFailedError)
        assert "rank 1" in str(errors[0])
        assert "'b'" in str(errors[0])
        assert absent(job, 0)

    def test_a_silent_rank_times_out_the_save(self, job, mode):
        saver = StepSaver(job, 0, 2, mode=mode, timeout=0.2)
        with pytest.raises(TimedOutError, match="all ranks"):
            save(saver, 0, [("a", torch.ones(4)), ("b", torch.ones(4))])
        assert absent(job, 0)

    def test_a_read_error_while_a_rank_waits_for_the_others_is_one_of_storage(self, job, mode, monkeypatch):
        def failing(writer):
            raise OSError(errno.EIO, os.strerror(errno.EIO), writer.path)

        monkeypatch.setattr(StepWriter, "sealed", failing)
        saver = StepSaver(job, 0, 2, mode=mode, timeout=60)
        with pytest.raises(StorageError, match="Input/output error"):
            save(saver, 0, [("a", torch.ones(4)), ("b", torch.ones(4))])

    def test_a_failing_rank_still_iterates_the_whole_export(self, job, mode):
        walked = []

        def export():
            for name in ("a", "b", "a", "c", "d"):
                walked.append(name)
                yield name, torch.ones(2)

        with pytest.raises(UsageError, match="twice"):
            save(StepSaver(job, 0, 1, mode="background"), 0, export)
        assert walked == ["a", "b", "a", "c", "d"]


def _fail_writes(monkeypatch, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(NewFile, "write", refuse)


def _together(savers, tensors):
    """Save with all ranks at once and return what each one met."""
    met = [None] * len(savers)

    def run(rank):
        try:
            savers[rank].save(0, "shared", tensors)
            savers[rank].wait()
        except SyncdError as error:
            met[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(savers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return met


class TestBackground:
    def test_training_continues_while_a_step_is_written(self, job, monkeypatch):
        events, gate = [], threading.Event()
        write = NewFile.write

        def held(self, piece, offset):
            assert gate.wait(30)
            events.append("write")
            write(self, piece, offset)

        monkeypatch.setattr(NewFile, "write", held)
        saver, weight = StepSaver(job, 0, 1, write_mode=BUFFERED), torch.ones(64)
        saver.save(0, "a", [("w", weight)])
        events.append("train")
        weight.fill_(7)  # the optimizer's next step must not reach what is being saved
        assert not saver._pending[2].done()
        assert absent(job, 0)
        gate.set()
        saver.wait()
        assert events[0] == "train"
        assert "write" in events
        assert load(job, 0)["w"].unique().item() == 1

    def test_the_pinned_buffer_is_reused_between_saves(self, job):
        saver = StepSaver(job, 0, 1)
        tensors = [(f"w{number}", torch.ones(300_000)) for number in range(8)]
        save(saver, 0, tensors)
        address, capacity = _place(saver)
        for step in range(1, 4):
            save(saver, step, tensors)
        assert _place(saver) == (address, capacity)
        assert capacity - 8 * 300_000 * 2 < 4096

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_prepared_memory_is_used_by_the_first_save(self, job, device):
        tensors = [(f"w{number}", torch.randn(300_001)) for number in range(8)]
        saver = StepSaver(job, 0, 1)
        saver.prepare([(name, tensor.to(device)) for name, tensor in tensors])
        address, capacity = _place(saver)
        save(saver, 0, tensors)
        assert _place(saver) == (address, capacity)
        assert capacity - 8 * 300_001 * 2 < 4096
        assert torch.equal(load(job, 0)["w7"], tensors[7][1].to(torch.bfloat16))
        saver.close()

    def test_prepared_memory_is_as_large_as_the_rank_s_share(self, job):
        savers = [StepSaver(job, rank, 2) for rank in range(2)]
        for saver, size in zip(savers, (40_960, 8192), strict=True):
            saver.prepare(
                [("a", torch.empty(20_480, device="meta")), ("b", torch.empty(4096, device="meta"))]
            )
            assert saver._buffers.next().capacity == size
            saver.close()

    def test_a_save_larger_than_prepared_succeeds(self, job):
        saver = StepSaver(job, 0, 1)
        saver.prepare([("w", torch.empty(10, device="meta"))])
        weight = torch.randn(100_000)
        save(saver, 0, [("w", weight)])
        assert torch.equal(load(job, 0)["w"], weight.to(torch.bfloat16))

    def test_prepare_is_refused_a_second_time_and_after_a_save(self, job, mode):
        saver = StepSaver(job, 0, 1, mode=mode)
        saver.prepare([("w", torch.ones(4))])
        with pytest.raises(UsageError, match="before the first save"):
            saver.prepare([("w", torch.ones(4))])
        save(saver, 0, [("w", torch.ones(4))])
        with pytest.raises(UsageError, match="before the first save"):
            saver.prepare([("w", torch.ones(4))])
        whole(job, 0)

    def test_resident_memory_does_not_grow_over_saves(self, job, mode):
        saver, tensors = StepSaver(job, 0, 1, mode=mode), [("w", torch.ones(8 << 20))]
        for step in range(2):
            save(saver, step, tensors)
        before = _resident()
        for step in range(2, 8):
            save(saver, step, tensors)
        assert _resident() - before < 16 << 20


def _place(saver):
    """Return where a saver's memory is, and its size."""
    arena = saver._buffers.next()
    return arena.bytes.data_ptr(), arena.capacity


def _resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def copy_all(helper, targets, tensors, *, lasts=True):
    with TensorCopies(helper) as copies:
        for target, tensor in zip(targets, tensors, strict=True):
            copies.add(target, tensor, lasts=lasts)


class TestCopies:
    @pytest.fixture
    def helper(self):
        with ThreadPoolExecutor(1) as helper:
            yield helper

    @pytest.mark.parametrize("lasts", [True, False])
    @pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(1 << 21,), (1237, 1013), (1 << 19, 3), (3,)])
    def test_two_threads_copy_the_same_as_one(self, helper, shape, source, lasts):
        tensors = [torch.randn(shape).to(source) for _ in range(9)]
        targets = [torch.empty(shape, dtype=torch.bfloat16) for _ in tensors]
        copy_all(helper, targets, tensors, lasts=lasts)
        assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(targets, tensors, strict=True))

    def test_a_non_contiguous_tensor_is_copied_by_value(self, helper):
        tensor = torch.randn(1300, 1400).t()
        target = torch.empty(tensor.shape)
        with TensorCopies(helper) as copies:
            copies.add(target, tensor)
        assert torch.equal(target, tensor)

    def test_a_reused_source_tensor_is_copied_at_once(self, helper):
        tensor, targets = torch.empty(1 << 20), [torch.empty(1 << 20) for _ in range(5)]
        with TensorCopies(helper) as copies:
            for number, target in enumerate(targets):
                copies.add(target, tensor.fill_(number))
        assert [target.unique().tolist() for target in targets] == [[float(number)] for number in range(5)]

    def test_an_error_of_the_copy_thread_is_raised_and_leaves_no_copy_running(self, helper):
        tensors = [torch.randn(1 << 20) for _ in range(3)]
        targets = [torch.empty(1 << 20) for _ in range(2)]
        wrong = torch.empty(1 << 20, dtype=torch.float64)[::2]  # half as many: the helper cannot copy into it
        with pytest.raises(RuntimeError):
            copy_all(helper, [targets[0], wrong, targets[1]], tensors)
        assert helper.submit(lambda: 1).result(10) == 1


class TestProbe:
    def test_a_file_system_without_direct_io_uses_another_write_mode(self, tmp_path, monkeypatch):
        real = os.open

        def refuse(path, flags, *more, **options):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return real(path, flags, *more, **options)

        monkeypatch.setattr(shard_module.os, "open", refuse)
        assert find_write_mode(str(tmp_path)) in (UNCACHED, BUFFERED)
        assert not os.listdir(tmp_path)

    def test_a_disk_that_was_full_at_the_first_save_is_written_as_others_are_once_it_has_room(
        self, job, mode, monkeypatch
    ):
        best, modes = find_write_mode(job.root), []
        if best is BUFFERED:
            pytest.skip("this mount takes ordinary writes alone")

        class WatchedFile(NewFile):
            def __init__(self, path, size, mode):
                modes.append(mode)
                super().__init__(path, size, mode)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shard_module, "NewFile", WatchedFile)
        with contextlib.closing(StepSaver(job, 0, 1, mode=mode)) as saver:
            with monkeypatch.context() as disk:
                disk.setattr(shard_module, "_allocate", full)
                with pytest.raises(StorageError, match="No space left"):
                    save(saver, 1, odd_tensors())
            save(saver, 2, odd_tensors())
        assert modes[-1] is best
