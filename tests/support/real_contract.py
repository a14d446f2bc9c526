"""What each real engine must show beside the contract of hooks: versions under load, damage, deaths on both sides."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

import pytest

from explorer_hooks.hook import Running
from explorer_hooks.parts.broadcast import delivery
from support import small_qwen
from support.broadcasts import received
from support.engine_process import ROOT
from support.hook_contract import HookContract, load
from support.real_bed import (
    CLOSE,
    LIMIT,
    Clients,
    RealJob,
    applied_next,
    awaited,
    cut_off,
    killed_before_resume,
    seed_of,
    taken_away,
)
from support.targets import label
from syncd.errors import EngineUnreachableError, LoadFailedError
from syncd.parts.broadcast.group_calls import GroupError

torch = pytest.importorskip("torch", reason="needs torch")

from explorer_hooks.parts.broadcast.received import allocate  # noqa: E402
from explorer_hooks.parts.broadcast.segments import Segment  # noqa: E402
from explorer_hooks.parts.broadcast.shared import CopiedBucket  # noqa: E402
from syncd.parts.broadcast.process_group import ProcessGroup  # noqa: E402


def wrong_shape(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:100].contiguous()


def without_a_tensor(tensors):
    del tensors["model.layers.1.mlp.down_proj.weight"]


def without_the_head(tensors):
    del tensors["lm_head.weight"]


def with_an_unknown_tensor(tensors):
    tensors["value_head.scale"] = torch.ones(1)


def breaking(monkeypatch, way, at, act):
    """Have `act` called instead of the sending of tensor `at`, or of the filling of bucket `at` of shared memory."""
    place, name = (ProcessGroup, "broadcast") if way == "gloo" else (CopiedBucket, "fill")
    real, left = getattr(place, name), [at]

    def counted(*given):
        left[0] -= 1
        return act(real, *given) if left[0] == 0 else real(*given)

    monkeypatch.setattr(place, name, counted)


class TakesWeights:
    """What a real engine must show of weights that come from the hook's memory. Beds and jobs are those below."""

    @pytest.fixture(params=["gloo", "ipc"])
    def way(self, request, bed, monkeypatch):
        """Return how weights are pushed; no segment of shared memory is left at the end."""
        names, link = [], Segment._link
        monkeypatch.setattr(Segment, "_link", lambda self, name: (names.append(name), link(self, name)))
        bed.settings = lambda: {"push": request.param}
        yield request.param
        assert bool(names) == (request.param == "ipc")
        assert not set(names).intersection(os.listdir("/dev/shm"))

    def test_pushed_weights_give_the_log_probs_of_the_model_for_any_bucket_size(
        self, bed, way, monkeypatch, record_line
    ):
        """Repeated and new prompts, with one bucket and with many; nobody but the hook calls it a version."""
        hook, other, seconds = bed.open(), bed.open(), []
        for number, bucket in enumerate([delivery.BUCKET, 100_000, 1], 1):
            monkeypatch.setattr(delivery, "BUCKET", bucket)
            begin = time.monotonic()
            hook.load_tensors(f"1.{number}+attempt", small_qwen.model_of(1000 + number).state_dict())
            seconds.append(time.monotonic() - begin)
            assert bed.distance(1000 + number) < CLOSE
            assert bed.distance(1000 + number, [number + 20] * 70) < CLOSE
            assert hook.current_version() == Running(f"1.{number}+attempt")
            assert other.current_version() == Running(f"1.{number}+attempt", paused=True)
        hook.set_label(label(3))
        assert bed.label() == label(3)
        assert other.current_version() == Running(label(3))
        told = ", ".join(f"{1e3 * one:.0f}" for one in seconds)
        record_line(f"{bed.engine}: ms of a push over {way} with 1, 6 and 27 buckets: {told}")

    def test_eight_pushed_versions_complete_all_streaming_requests(self, bed, way, record_line):
        """By ipc all are received into the same memory, where the next one comes as soon as the engine works."""
        hook, clients, distances = bed.open(), Clients(bed.stream, 4), []
        memory = allocate(small_qwen.SIZE) if way == "ipc" else None
        for number in range(1, 9):
            tensors = small_qwen.model_of(1000 + number).state_dict()
            held = tensors if memory is None else received(tensors, memory)
            hook.load_tensors(f"1.{number}+attempt", held)
            if memory is not None:
                memory.fill_(7)
            distances.append(bed.distance(1000 + number))
        del memory, held
        assert max(distances) < CLOSE
        assert clients.finish() >= 4
        assert hook.current_version() == Running("1.8+attempt")
        record_line(f"{bed.engine}: 8 versions over {way}, log-probs within {max(distances):.1e} nats")

    @pytest.mark.parametrize("at", [2, 6, 15])
    def test_a_failed_push_leaves_the_engine_paused_until_files_are_loaded(self, bed, way, monkeypatch, at):
        hook, good = bed.open(), bed.target((1, 1))
        load(hook, good)
        monkeypatch.setattr(delivery, "BUCKET", 100_000 if way == "gloo" else 1)

        def broken(real, *given):
            raise GroupError("told to break off")

        breaking(monkeypatch, way, at, broken)
        with pytest.raises(LoadFailedError):
            hook.load_tensors("1.2+attempt", small_qwen.model_of(1002).state_dict())
        assert bed.is_paused()
        hook.abort(good)
        assert bed.runs(good)
        assert hook.current_version() == Running(bed.target((1, 1)).label)
        hook.load_tensors("1.3+attempt", small_qwen.model_of(1003).state_dict())
        assert bed.distance(1003) < CLOSE

    def test_the_next_hook_loads_an_engine_whose_hook_was_killed_during_a_push(
        self, bed, way, start_directory, monkeypatch
    ):
        program = f"{ROOT}/tests/parts/broadcast/programs/hand.py"
        argv = [sys.executable, program, bed.hook_name, bed.process.address, start_directory, way]
        env = {**os.environ, "PYTHONPATH": ROOT}
        ended = subprocess.run(argv, env=env, timeout=LIMIT, check=False, stdout=subprocess.PIPE, text=True)
        assert ended.returncode == -signal.SIGKILL
        left = {line.split()[1] for line in ended.stdout.splitlines()}
        assert bool(left.intersection(os.listdir("/dev/shm"))) == (way == "ipc")
        hook, good = bed.open(), bed.target((1, 1))
        assert hook.current_version().paused
        load(hook, good)
        assert bed.runs(good)
        hook.load_tensors("1.2+attempt", small_qwen.model_of(1002).state_dict())
        assert bed.distance(1002) < CLOSE
        assert not left.intersection(os.listdir("/dev/shm"))

    def test_an_engine_killed_during_a_push_loads_files_after_its_restart(self, bed, way, monkeypatch):
        hook = bed.open()
        monkeypatch.setattr(delivery, "BUCKET", delivery.BUCKET if way == "gloo" else 1)

        def deadly(real, *given):
            bed.process.kill()
            return real(*given)

        breaking(monkeypatch, way, 5, deadly)
        with pytest.raises((EngineUnreachableError, LoadFailedError)):
            hook.load_tensors("1.2+attempt", small_qwen.model_of(1002).state_dict())
        with pytest.raises(EngineUnreachableError):
            hook.abort(None)
        bed.process.start()
        good = bed.target((1, 2))
        load(hook, good)
        assert bed.runs(good)
        assert hook.current_version() == Running(bed.target((1, 2)).label)


class RealEngineContract(HookContract):
    """Subclasses name the bed, and start one engine for all their tests."""

    bed_type = None

    @pytest.fixture(scope="class")
    @classmethod
    def start_directory(cls, tmp_path_factory):
        return small_qwen.write_model(str(tmp_path_factory.mktemp("start")))

    @pytest.fixture
    def bed(self, engine, tmp_path, start_directory):
        with self.bed_type(engine, tmp_path, start_directory) as bed:
            yield bed

    @pytest.fixture
    def hook(self, bed):
        hook = bed.open(timeout=20.0)  # well below what the contract takes for no end at all
        yield hook
        hook.close()

    @pytest.fixture
    def job(self, tmp_path):
        job = RealJob(tmp_path / "job")
        yield job
        job.close()

    def test_twenty_versions_complete_all_streaming_requests(self, bed, job, record_line):
        timings, distances = [], []
        clients = Clients(bed.stream)
        with job.follower(bed.open()) as follower:
            for step in range(1, 21):
                job.publish(step)
                timings.append(applied_next(follower, (1, step)).timings)
                seed = seed_of((1, step))
                assert bed.label() == job.label(step)
                assert follower.applied == (1, step)
                # The first prompt is the same for every version: stale blocks of the prefix cache would show.
                distances.append(bed.distance(seed))
                distances.append(bed.distance(seed, [step + 20] * 70))
            answered = clients.finish()
        assert max(distances) < CLOSE
        assert answered >= 8
        load = [1e3 * one["load"] for one in timings]
        record_line(
            f"{bed.engine}: 20 versions under 8 streams, {answered} requests all complete, log-probs within "
            f"{max(distances):.1e} nats; pause to resume ms median {statistics.median(load):.0f} "
            f"max {max(load):.0f}"
        )
        record_line(f"{bed.engine}: seconds of the last load: {json.dumps(dict(timings[-1]))}")
        record_line(f"{bed.engine}: started in {bed.process.started_in:.0f} s")

    @pytest.mark.parametrize("damage", [cut_off, taken_away])
    def test_a_damaged_shard_is_refused_before_the_engine_is_touched(self, bed, job, damage):
        job.publish(1)
        with job.follower(bed.open(), retries=0) as follower:
            applied_next(follower, (1, 1))
            pauses = bed.pauses()
            job.publish(2)
            damage(job, 2)
            outcome = follower.turn(LIMIT)
            assert (outcome.kind, outcome.pair) == ("refused", (1, 2))
            assert bed.pauses() == pauses
            assert bed.distance(seed_of((1, 1))) < CLOSE
            job.publish(3)
            applied_next(follower, (1, 3))
            assert bed.distance(seed_of((1, 3))) < CLOSE

    @pytest.mark.parametrize(
        "change", [wrong_shape, without_a_tensor, without_the_head, with_an_unknown_tensor]
    )
    @pytest.mark.parametrize("first", [True, False])
    def test_a_version_of_another_model_is_refused_before_the_engine_is_touched(
        self, bed, job, change, first
    ):
        with job.follower(bed.open(), retries=0) as follower:
            if not first:
                job.publish(1)
                applied_next(follower, (1, 1))
            pauses = bed.pauses()
            job.publish(2, change=change)
            outcome = follower.turn(LIMIT)
            assert (outcome.kind, outcome.pair) == ("refused", (1, 2))
            assert bed.pauses() == pauses
            assert bed.distance(0 if first else seed_of((1, 1))) < CLOSE

    def test_the_next_follower_resumes_an_engine_whose_follower_was_killed(self, bed, job):
        answered, begun = [], threading.Event()
        client = threading.Thread(target=lambda: answered.append(bed.stream([7] * 20, 400, begun=begun)))
        job.publish(1)
        client.start()
        assert begun.wait(LIMIT)
        assert killed_before_resume(job, bed.hook_name, bed.process.address) == -9
        assert bed.is_paused()
        job.publish(2)
        with job.follower(bed.open()) as follower:
            applied_next(follower, (1, 2))
            assert not bed.is_paused()
            assert bed.distance(seed_of((1, 2))) < CLOSE
        client.join(LIMIT)
        assert answered == [400]

    def test_a_restarted_engine_gets_the_newest_version_before_it_is_ready(self, bed, job, tmp_path):
        ready = tmp_path / "ready"
        job.publish(1)
        with job.follower(bed.open(), ready_file=str(ready)) as follower:
            applied_next(follower, (1, 1))
            assert ready.read_text().split()[0] == "1.1"
            bed.bring_down(job, tmp_path)
            bed.process.kill()
            assert follower.turn(5.0).kind == "unreachable"
            assert not ready.exists()
            assert not follower.may_work()
            job.publish(2)
            bed.process.start()
            awaited(lambda: follower.turn(1.0).kind == "applied" or follower.applied == (1, 2))
            assert bed.label() == job.label(2)
            assert bed.distance(seed_of((1, 2))) < CLOSE
            assert ready.read_text().split()[0] == "1.2"
            assert follower.may_work()
