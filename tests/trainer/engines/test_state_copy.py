"""Copies of training states in host memory, and the files that are written of them."""

import collections
import errno
import os
import resource

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

import torch
from support.engine_cases import content_of, equal

from syncd.errors import StorageError
from syncd.transports.host_memory import HostMemory
from trainer.engines.state_copy import StateBuffer, write_files

MIB = 1 << 20


def state_of(model):
    """Return the state of a model after a step of AdamW, as engines give it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    extra = {"rng": torch.get_rng_state(), "schedule": [1, 2], "note": b"raw"}
    return {"model.pt": model.state_dict(), "optim.pt": optimizer.state_dict(), "more/extra.pt": extra}


@pytest.fixture
def arena():
    made = StateBuffer(HostMemory(MIB))
    yield made
    made.close()


def test_the_files_of_a_copy_hold_the_state_at_the_capture(arena, tmp_path):
    model = torch.nn.Linear(4, 4)
    state = state_of(model)
    torch.save(state["model.pt"], tmp_path / "before.pt")
    torch.save(state["optim.pt"], tmp_path / "before_optim.pt")
    captured = arena.capture(state)
    with torch.no_grad():
        model.weight.add_(1)
        state["optim.pt"]["state"][0]["exp_avg"].add_(1)
    state["more/extra.pt"]["schedule"].append(3)
    assert captured.live == ""
    assert captured.write(str(tmp_path)) == ["model.pt", "optim.pt", "more/extra.pt"]
    assert equal(content_of(f"{tmp_path}/model.pt"), content_of(f"{tmp_path}/before.pt"))
    assert equal(content_of(f"{tmp_path}/optim.pt"), content_of(f"{tmp_path}/before_optim.pt"))
    assert content_of(f"{tmp_path}/more/extra.pt")["schedule"] == [1, 2]
    assert os.path.getsize(tmp_path / "model.pt") < 100 + os.path.getsize(tmp_path / "before.pt")
    assert isinstance(content_of(f"{tmp_path}/model.pt"), collections.OrderedDict)


def test_a_copy_reuses_the_memory_of_the_one_before(arena, tmp_path):
    model = torch.nn.Linear(4, 4)
    arena.capture(state_of(model)).write(str(tmp_path))
    first = arena._buffer.bytes.data_ptr()
    arena.capture(state_of(model)).write(str(tmp_path))
    assert arena._buffer.bytes.data_ptr() == first


def test_prepared_memory_is_what_the_first_copy_is_made_in(arena, tmp_path):
    state = state_of(torch.nn.Linear(4, 4))
    arena.prepare(state)
    ahead = arena._ahead.result().bytes.data_ptr()
    arena.capture(state).write(str(tmp_path))
    assert arena._buffer.bytes.data_ptr() == ahead
    arena.prepare({"a.pt": torch.zeros(MIB)})
    assert arena.capture(state).live == "", "what does not fit is not allocated ahead"


def test_tensors_that_share_memory_are_copied_and_written_once(arena, tmp_path):
    weight = torch.randn(64, 64)
    arena.capture({"tied.pt": {"embed": weight, "head": weight.detach()}}).write(str(tmp_path))
    found = torch.load(tmp_path / "tied.pt")
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert os.path.getsize(tmp_path / "tied.pt") < 1.5 * weight.nbytes


def test_empty_and_strided_tensors_and_bytes_are_copied(arena, tmp_path):
    state = {"empty": torch.empty(0, 3), "turned": torch.arange(6).reshape(2, 3).T, "one": torch.tensor(2.0)}
    arena.capture({"a.pt": state, "b.json": b"{}"}).write(str(tmp_path))
    assert equal(torch.load(tmp_path / "a.pt"), state)
    assert (tmp_path / "b.json").read_bytes() == b"{}"


def test_a_state_beyond_the_budget_is_not_copied_and_the_reason_names_both(tmp_path):
    memory = HostMemory(MIB)
    memory.record("the buffer for weights", MIB // 2)
    arena, weight = StateBuffer(memory), torch.zeros(MIB // 4)
    captured = arena.capture({"a.pt": weight})
    assert captured.live == "no room for the copy of the training state: 1 MiB where 0 of 1 are free"
    weight.add_(1)
    captured.write(str(tmp_path))
    assert torch.load(tmp_path / "a.pt").sum() == weight.numel(), "what is written is the engine's own state"
    assert memory.used == MIB // 2
    arena.close()


def test_tensors_of_unknown_types_are_not_copied(arena):
    class Odd(torch.Tensor):
        pass

    assert arena.capture({"a.pt": torch.zeros(2).as_subclass(Odd)}).live == "it has tensors of type Odd"


def test_a_full_disk_is_a_storage_error_with_its_cause(arena):
    captured = arena.capture({"full": torch.zeros(1000)})
    with pytest.raises(StorageError, match="No space left"):
        captured.write("/dev")


def test_a_closed_arena_gives_its_share_of_the_budget_back():
    memory = HostMemory(MIB)
    arena = StateBuffer(memory)
    arena.capture({"a.pt": torch.zeros(1000)})
    assert memory.used > 4000
    arena.close()
    assert memory.used == 0


def test_a_file_that_has_no_room_says_what_the_system_says(tmp_path):
    """torch raises `unexpected pos` over the system's error; a limit of the sizes of files fails as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large") as caught:
            write_files({"model.pt": {"w": torch.zeros(1 << 18)}}, str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.path == f"{tmp_path}/model.pt"
