"""Meeting and leaving: one rank, ranks that do not come, a port that is taken, a peer that has gone."""

import socket

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
dist = pytest.importorskip("torch.distributed")

from support.launching import Launch  # noqa: E402

from syncd.errors import ConfigError, TimedOutError, TryAgainError  # noqa: E402
from syncd.transports.ranks import Ranks, is_agreed  # noqa: E402
from trainer.config import job_config  # noqa: E402
from trainer.launch import process_group  # noqa: E402
from trainer.launch.process_group import open_ranks, pick_device  # noqa: E402
from trainer.launch.rank_env import RankEnv  # noqa: E402

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def listener(monkeypatch):
    for name in RankEnv().variables():
        monkeypatch.setenv(name, "restored afterwards")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


def test_one_rank_has_collectives_and_a_device_mesh():
    ranks = open_ranks(RankEnv(), CPU, 30)
    assert type(ranks) is Ranks
    assert (ranks.broadcast(1), ranks.gather(2)) == (1, [2])
    mesh = importorskip_mesh()("cpu", (1,))
    assert mesh.size() == 1
    ranks.close()
    assert not dist.is_initialized()


def importorskip_mesh():
    return pytest.importorskip("torch.distributed.device_mesh").init_device_mesh


def test_missing_ranks_time_out(listener):
    port = listener.getsockname()[1]
    listener.close()
    for rank in (0, 1):
        place = RankEnv(rank, rank, 2, 2, "127.0.0.1", port, "slurm")
        with pytest.raises(TimedOutError, match=rf"rank {rank} of 2 .* 127\.0\.0\.1:{port}"):
            open_ranks(place, CPU, 1.0)
    assert not dist.is_initialized()


def test_a_port_in_use_is_reported_with_a_hint(listener):
    listener.listen()
    place = RankEnv(0, 0, 2, 2, "127.0.0.1", listener.getsockname()[1], "slurm")
    with pytest.raises(TryAgainError, match="another process does") as caught:
        open_ranks(place, CPU, 60.0)
    assert "MASTER_PORT" in caught.value.hint


def test_a_peer_that_exited_ends_the_rank_with_a_time_out_error(tmp_path):
    code, _, errors = Launch(tmp_path, "--nproc", "2", "--rank", "desert").ended()
    assert code == TimedOutError.exit_code
    assert "error: another rank has ended or does not answer" in errors
    assert "Traceback" not in errors


class TestDevice:
    @pytest.fixture
    def gpus(self, monkeypatch):
        return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    def test_the_device_is_the_local_rank_s_gpu_or_the_cpu(self, gpus):
        gpus(0)
        assert pick_device("auto", 3) == CPU
        gpus(4)
        assert pick_device("auto", 3) == torch.device("cuda", 3)
        assert pick_device("cpu", 3) == CPU

    def test_a_rank_that_sees_one_gpu_uses_it(self, gpus):
        gpus(1)
        assert pick_device("cuda", 3) == torch.device("cuda", 0)

    @pytest.mark.parametrize("count", [0, 2])
    def test_a_missing_gpu_is_refused(self, gpus, count):
        gpus(count)
        with pytest.raises(ConfigError):
            pick_device("cuda", 2)


class Told(Ranks):
    """Ranks of which one looks at the errors of all."""

    world_size = 2

    def __init__(self, rank, errors):
        self.rank, self.errors = rank, errors

    def gather(self, error):
        self.errors.append(error)
        return self.errors


def test_a_refused_configuration_ends_all_ranks_and_rank_0_reports_it(monkeypatch):
    def refuse(config, allowed):
        raise ConfigError("it contradicts the job")

    monkeypatch.setattr(job_config, "enter_job_dir", refuse)
    place, errors = RankEnv(origin="torchrun"), []
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="contradicts") as caught:
            process_group.share_config(None, place, Told(rank, errors))
        assert is_agreed(caught.value)
