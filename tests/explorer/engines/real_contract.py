"""What each real engine must show beside the contract of hooks: versions under load, damage, deaths on both sides."""

import json
import statistics
import threading

import pytest
import small_qwen
from hook_contract import HookContract
from real_bed import (
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


def wrong_shape(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:100].contiguous()


def without_a_tensor(tensors):
    del tensors["model.layers.1.mlp.down_proj.weight"]


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

    def test_twenty_versions_while_clients_stream(self, bed, job, record_line):
        timings, distances = [], []
        clients = Clients(bed.stream)
        with job.follower(bed.open()) as follower:
            for step in range(1, 21):
                job.publish(step)
                timings.append(applied_next(follower, (1, step)).timings)
                seed = seed_of((1, step))
                assert bed.label() == f"1.{step}"
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

    @pytest.mark.parametrize("change", [wrong_shape, without_a_tensor])
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

    def test_a_follower_killed_between_pause_and_resume_is_succeeded_by_one_that_brings_the_engine_back(
        self, bed, job
    ):
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

    def test_a_restarted_engine_comes_to_the_newest_version_before_it_takes_work(self, bed, job, tmp_path):
        ready = tmp_path / "ready"
        job.publish(1)
        with job.follower(bed.open(), ready_file=str(ready)) as follower:
            applied_next(follower, (1, 1))
            assert ready.read_text().split() == ["1.1"]
            bed.bring_down(job, tmp_path)
            bed.process.kill()
            assert follower.turn(5.0).kind == "unreachable"
            assert not ready.exists()
            assert not follower.may_work()
            job.publish(2)
            bed.process.start()
            awaited(lambda: follower.turn(1.0).kind == "applied" or follower.applied == (1, 2))
            assert bed.label() == "1.2"
            assert bed.distance(seed_of((1, 2))) < CLOSE
            assert ready.read_text().split() == ["1.2"]
            assert follower.may_work()
