"""The synchronizer has the names and parameters that Trinity-RFT's users know, in both faces."""

import asyncio
import inspect
import types

import numpy as np
import pytest
from support.jobs import start

from syncd.errors import JobMissingError, UsageError
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import RunningStatus
from syncd.synchronizer import AsyncSynchronizer, Synchronizer

METHODS = {
    "add_module": ["module_ref"],
    "set_trainer_status": ["status"],
    "trainer_requires_weight_sync": [],
    "set_explorer_status": ["status", "old_status"],
    "explorer_requires_sync": [],
    "set_model_state_dict": ["model_state_dict", "trainer_step"],
    "get_model_state_dict": [],
    "get_model_state_dict_iterator": [],
    "setup_weight_sync_group": ["master_address", "master_port", "state_dict_meta"],
    "coordinate_weight_sync_setup": ["timeout"],
    "coordinate_weight_sync_teardown": [],
    "wait_new_model_state_dict": ["current_version"],
    "notify_no_new_model_state_dict": [],
    "get_latest_model_version": [],
    "get_latest_model_path": ["use_huggingface"],
    "ready_to_nccl_sync": ["module", "trainer_step"],
    "get_actor": ["config", "namespace"],
}
"""The public methods of their page, each with its parameters in order; what has a default there has one here."""

OPTIONAL = {"old_status", "state_dict_meta", "timeout", "use_huggingface", "config", "namespace"}

OTHERS = {
    "get_trainer_status": [],
    "get_explorer_status_counts": [],
    "checkpoint_shard_counter": ["step"],
    "set_model_state_dict_with_step_num": ["step_num", "world_size"],
    "get_state_dict_meta": [],
    "get_weight_sync_info": [],
    "teardown_weight_sync_group": [],
}
"""Names of other releases of theirs."""

ATTRIBUTES = ["trainer_status", "explorer_status_counts", "model_state_dict", "model_version"]


@pytest.mark.parametrize(("name", "parameters"), (METHODS | OTHERS).items())
def test_each_synchronizer_method_takes_the_parameters_of_trinity_rft(name, parameters):
    found = inspect.signature(getattr(Synchronizer, name)).parameters
    ours = [parameter for key, parameter in found.items() if key != "self"]
    assert [parameter.name for parameter in ours][: len(parameters)] == parameters
    assert all(one.default is not one.empty for one in ours if one.name in OPTIONAL)
    # What is ours beside theirs is never required.
    rest = [one for one in ours[len(parameters) :] if one.kind is not one.VAR_KEYWORD]
    assert all(one.default is not one.empty for one in rest)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", sorted((METHODS | OTHERS).keys() - {"get_actor"}))
def test_the_asyncio_synchronizer_has_each_method(job, name):
    async def found():
        async with await AsyncSynchronizer.open(job) as sync:
            method = getattr(sync, name)
            return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)

    assert asyncio.run(found())


def test_the_asyncio_synchronizer_has_no_other_names(job):
    async def run():
        async with await AsyncSynchronizer.open(job) as sync:
            for name in ("carrier_pigeon", "_own", *ATTRIBUTES):
                with pytest.raises(AttributeError):
                    getattr(sync, name)

    asyncio.run(run())


@pytest.mark.parametrize("by", ["path", "config", "namespace"])
def test_get_actor_opens_an_observer_and_writes_nothing(job, by):
    config = types.SimpleNamespace(checkpoint_job_dir=str(job))
    found = {
        "path": lambda: Synchronizer.get_actor(job),
        "config": lambda: Synchronizer.get_actor(config, "ignored"),
        "namespace": lambda: Synchronizer.get_actor(namespace=str(job)),
    }[by]()
    with found as sync:
        assert (sync.role, sync.job.root) == ("observer", str(job))
    assert list(job.iterdir()) == []


def test_get_actor_may_take_a_role(job):
    with Synchronizer.get_actor(job, role="explorer", identity="e0", heartbeat=False) as sync:
        assert sync.identity == "e0"
        assert sync.explorer_status_counts[RunningStatus.RUNNING] == 1


def test_get_actor_refuses_a_missing_job(tmp_path):
    with pytest.raises(UsageError, match="job directory"):
        Synchronizer.get_actor()
    with pytest.raises(JobMissingError):
        Synchronizer.get_actor(namespace=str(tmp_path / "absent"))


def test_synchronizer_attributes_are_read_from_the_job(job):
    with (
        Synchronizer.open(job, "trainer", heartbeat=False) as trainer,
        Synchronizer.open(job, "explorer", "e0", heartbeat=False) as explorer,
    ):
        assert (explorer.model_version, explorer.model_state_dict) == (0, None)
        trainer.set_trainer_status(RunningStatus.REQUIRE_SYNC)
        assert explorer.trainer_status is RunningStatus.REQUIRE_SYNC
        explorer.set_explorer_status(RunningStatus.STOPPED)
        counted = {RunningStatus.RUNNING: 0, RunningStatus.REQUIRE_SYNC: 0, RunningStatus.STOPPED: 1}
        assert trainer.explorer_status_counts == counted
        daemon, _, _ = start(trainer.job, SystemClock())
        trainer.set_model_state_dict({"w": np.full((2,), 3.0, np.float32)}, 3)
        daemon.tick(woken=True)
        daemon.close()
        assert explorer.model_version == 3
        assert np.frombuffer(explorer.model_state_dict["w"].data, np.float32).tolist() == [3.0, 3.0]


def test_add_module_updates_the_own_presence_only(job):
    with Synchronizer.open(job, "explorer", "e0", heartbeat=False) as explorer:
        beat = explorer.explorers.read()["e0"].beat
        explorer.add_module(object())
        assert explorer.explorers.read()["e0"].beat == beat + 1
        assert set(explorer.explorers.read()) == {"e0"}
    with Synchronizer.open(job) as observer:
        observer.add_module()
        assert set(observer.explorers.read()) == {"e0"}
