"""What the trainer makes of what its explorers say of their GPUs, and of NCCL having failed with them."""

from dataclasses import asdict

import pytest
import torch

from syncd.jobfile.sections import SyncSection
from syncd.parts.broadcast import process_group
from syncd.parts.broadcast.send import BroadcastSender, _members
from syncd.protocol.backend import GLOO, KEY, NCCL, Gpu
from syncd.protocol.layout import Job
from syncd.protocol.presence import Presence
from syncd.transports.base import SendContext
from syncd.transports.ranks import Ranks

OWN = Gpu("0a", "2.27")


def presence(name, uuid, start="first"):
    info = {"broadcast": "gloo"} | ({KEY: asdict(Gpu(uuid, "2.27"))} if uuid else {})
    return Presence(name, incarnation=start, info=info)


@pytest.fixture
def broadcaster(monkeypatch, tmp_path):
    """One whose weights are on a GPU, as far as it knows."""
    monkeypatch.setattr(process_group, "gpu_of", lambda device: OWN if device.type == "meta" else None)
    context = SendContext(Job.at(tmp_path), Ranks(), SyncSection())
    made = BroadcastSender(context, None)
    export = [("w", torch.zeros(3, device="meta"))]
    made._planned(export)
    return made


def test_trainer_and_explorers_each_with_their_own_gpu_use_nccl(broadcaster):
    assert broadcaster._chosen({"a": presence("a", "1b"), "b": presence("b", "2c")}).backend == NCCL


@pytest.mark.parametrize("uuid", [None, OWN.uuid])
def test_an_explorer_without_its_own_gpu_uses_gloo(broadcaster, uuid):
    assert broadcaster._chosen({"a": presence("a", "1b"), "b": presence("b", uuid)}).backend == GLOO


def test_weights_in_main_memory_use_gloo(broadcaster):
    broadcaster._plan = None
    broadcaster._planned([("w", torch.zeros(3))])
    assert broadcaster._chosen({"a": presence("a", "1b")}).backend == GLOO


def test_explorers_with_which_nccl_failed_use_gloo_until_one_restarts(broadcaster):
    failed = {"a": presence("a", "1b"), "b": presence("b", "2c")}
    broadcaster._without_nccl.append(_members(failed))
    assert broadcaster._chosen(failed).backend == GLOO
    assert broadcaster._chosen({"a": failed["a"]}).backend == NCCL
    assert broadcaster._chosen(failed | {"b": presence("b", "2c", "second")}).backend == NCCL
