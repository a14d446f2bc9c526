"""How many ranks a machine gets, and the settings they start with."""

import pytest

from trainer.launch import machine
from trainer.launch.machine import count_gpus, count_ranks, settings


@pytest.mark.parametrize(
    ("listed", "visible", "count"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "GPU-a, GPU-b", 2),
        (4, "0,2", 2),
        (4, "1,-1,2", 1),
        (2, "0,1,2,3", 2),
        (0, "0", 0),
    ],
)
def test_gpus_are_counted_as_cuda_visible_devices_says(monkeypatch, listed, visible, count):
    monkeypatch.setattr(machine, "_listed_gpus", lambda: listed)
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpus_are_listed_by_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: a)'; echo '  MIG 1g: b'; echo 'GPU 1: X (UUID: c)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert count_gpus({}) == 2


def test_the_rank_count_follows_the_setting_and_the_gpus(monkeypatch):
    monkeypatch.setattr(machine, "_listed_gpus", lambda: 8)
    assert [count_ranks("auto", "auto", {}), count_ranks("auto", "cpu", {}), count_ranks(3, "cpu", {})] == [
        8,
        1,
        3,
    ]
    monkeypatch.setattr(machine, "_listed_gpus", lambda: 0)
    assert count_ranks("auto", "auto", {}) == 1


def test_rank_environment_keeps_the_user_s_settings(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    found = settings(4, {})
    assert found["OMP_NUM_THREADS"] == "2"
    assert settings(64, {})["OMP_NUM_THREADS"] == "1"
    tuned = settings(4, {"OMP_NUM_THREADS": "7", "GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    assert tuned == {
        "OMP_NUM_THREADS": "7",
        "GLIBC_TUNABLES": f"glibc.malloc.arena_max=1:{found['GLIBC_TUNABLES']}",
    }
    assert "GLIBC_TUNABLES" not in settings(4, {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x1"})
