"""While a training state is loaded, no pickle runs code, whichever library opens it and in whichever thread."""

import os
import pickle
import threading

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

import numpy as np  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from syncd.errors import CorruptDataError  # noqa: E402
from trainer.safe_unpickle import load_plain, only_plain_data  # noqa: E402


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return (open, (self._mark, "w"))


@pytest.fixture
def place(tmp_path):
    """Return a directory with an object in files of all kinds that libraries read of a checkpoint."""
    bad = {"weights": torch.ones(2), "planted": Planted(str(tmp_path / "ran"))}
    torch.save(bad, tmp_path / "saved.pt")
    torch.save(bad, tmp_path / "former.pt", _use_new_zipfile_serialization=False)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(bad))
    return tmp_path


READERS = {
    "torch.load": lambda place: torch.load(place / "saved.pt", weights_only=False),
    "torch.load of the former format": lambda place: torch.load(place / "former.pt", weights_only=False),
    "pickle.load": lambda place: pickle.loads((place / ".metadata").read_bytes()),
    "pickle's Python": lambda place: pickle._loads((place / ".metadata").read_bytes()),
    "a distributed checkpoint": lambda place: dcp.FileSystemReader(place).read_metadata(),
    "numpy.load": lambda place: np.load(place / ".metadata", allow_pickle=True),
    "our own": lambda place: load_plain(f"{place}/saved.pt"),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_runs_what_a_file_pickles(place, reader):
    with pytest.raises(CorruptDataError, match="running code"), only_plain_data(str(place)):
        READERS[reader](place)
    assert not (place / "ran").exists()


def test_threads_of_a_library_are_bound_too(place):
    refused = []

    def read():
        with pytest.raises(pickle.UnpicklingError):
            READERS["pickle.load"](place)
        refused.append(True)

    with only_plain_data(str(place)):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert refused == [True]
    assert not (place / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_generators_and_metadata_of_distributed_checkpoints_are_data(tmp_path):
    state = {"rng": {"numpy": np.random.get_state(), "cpu": torch.get_rng_state()}, "lr": 0.1}  # noqa: NPY002 - what verl saves
    torch.save(state, tmp_path / "state.pt")
    dcp.save({"a": torch.ones(3), "b": 7}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with only_plain_data(str(tmp_path)):
        loaded = torch.load(tmp_path / "state.pt", weights_only=False)
        target = {"a": torch.zeros(3), "b": 0}
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert (loaded["rng"]["numpy"][1] == state["rng"]["numpy"][1]).all()
    assert torch.equal(target["a"], torch.ones(3))
    assert target["b"] == 7


def test_after_the_block_and_in_it_alone_it_holds(place, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for name in ("torch.load", "pickle.load"):
        with pytest.raises(CorruptDataError), only_plain_data(str(place)), only_plain_data(str(place)):
            READERS[name](place)
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    READERS["pickle.load"](place).pop("planted").close()
    assert (place / "ran").exists(), "elsewhere a pickle is what it always was"
