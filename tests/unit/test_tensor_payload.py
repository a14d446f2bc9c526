"""Tensors in and out of a shard: what is written is what the safetensors library reads, and the other way."""

import subprocess
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import load, save

from syncd.client.state_dict import encode_state, iterate_state, read_state, state_files
from syncd.errors import CorruptDataError, UsageError
from syncd.protocol.layout import Job
from syncd.protocol.safetensors import ALIGN, parse_header
from syncd.protocol.writer import StepWriter

DTYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint8",
    "bool",
]


def encoded(state):
    return b"".join(bytes(piece) for piece in encode_state(state))


def arrays():
    made = {name: (np.arange(24).reshape(2, 3, 4) % 5).astype(name) for name in DTYPES}
    made["scalar"] = np.float32(7).reshape(())
    made["empty"] = np.zeros((0, 3), np.float16)
    made["fortran"] = np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3))
    made["strided"] = np.arange(20, dtype=np.float32)[::3]
    return made


def test_the_safetensors_library_reads_encoded_tensors():
    made = arrays()
    found = load(encoded(made))
    assert found.keys() == made.keys()
    for name, array in made.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array)


def test_big_endian_arrays_are_byte_swapped():
    found = load(encoded({"a": np.arange(5, dtype=">f4")}))
    np.testing.assert_array_equal(found["a"], np.arange(5, dtype=np.float32))


def test_triples_of_dtype_shape_and_bytes_are_encoded_unchanged():
    found = load(
        encoded({"a": ("F32", (2,), np.array([1, 2], np.float32).tobytes()), "b": ("uint8", [1], b"x")})
    )
    np.testing.assert_array_equal(found["a"], [1, 2])
    assert found["b"].tobytes() == b"x"


def test_tensor_data_is_aligned():
    data = encoded(arrays())
    assert parse_header(data, len(data)).data_offset % ALIGN == 0


def test_tensors_are_converted_one_at_a_time():
    turned = []

    class Lazy:
        dtype, shape, flags = np.dtype("float32"), (2,), np.zeros(2).flags

        def __init__(self, name):
            self.name = name

        def reshape(self, *_):
            turned.append(self.name)
            return np.zeros(2, np.float32)

    pieces = encode_state({"a": Lazy("a"), "b": Lazy("b")})
    next(pieces)
    assert turned == []
    next(pieces)
    assert turned == ["a"]


@pytest.mark.parametrize(
    "state",
    [
        {"a": "text"},
        {"a": [1.0, 2.0]},
        {"a": np.array(["x"])},
        {"a": ("F32", (3,), b"short")},
        {"a": ("F99", (1,), b"1234")},
        {"__metadata__": np.zeros(1)},
        {3: np.zeros(1)},
    ],
)
def test_values_that_are_not_tensors_are_refused(state):
    with pytest.raises(UsageError):
        encoded(state)


class FakeTensor:
    """What is used of a torch tensor, so that the path runs where there is no torch."""

    def __init__(self, array, dtype):
        self.array, self.dtype, self.shape = array, dtype, array.shape

    def detach(self):
        return self

    contiguous = cpu = detach

    def reshape(self, length):
        return FakeTensor(self.array.reshape(length), self.dtype)

    def view(self, dtype):
        assert dtype == "torch.uint8"
        return FakeTensor(self.array.view("uint8"), dtype)

    def numpy(self):
        return self.array


def test_torch_tensors_are_encoded_without_importing_torch(monkeypatch):
    torch = types.SimpleNamespace(Tensor=FakeTensor, uint8="torch.uint8")
    monkeypatch.setitem(sys.modules, "torch", torch)
    bits = np.array([[0x3F80, 0x4000]], np.uint16)
    data = encoded({"w": FakeTensor(bits, "torch.bfloat16")})
    tensor = parse_header(data, len(data)).tensors["w"]
    assert (tensor.dtype, tensor.shape) == ("BF16", (1, 2))
    assert data[-4:] == bits.tobytes()


def test_the_synchronizer_and_watch_do_not_import_torch():
    """In a process of its own: other tests of this one may have imported it."""
    program = "import sys, syncd.synchronizer, syncd.cli.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.fixture
def step(tmp_path):
    job = Job.at(tmp_path)
    writer = StepWriter(job, 1, 2, "a")
    writer.begin()
    for rank in (1, 2):
        content = save({f"t{rank}": np.full(3, rank, np.float32), f"u{rank}": np.zeros((), np.int8)})
        shard = writer.write(f"actor/model-{rank:05d}-of-00002.safetensors", content, tensors=2)
        writer.receipt(rank, [shard])
    return job, writer.seal()


def files_of(job, manifest):
    return state_files(job.disk, job.step(1), manifest.shards)


def test_a_step_is_read_back_from_all_its_shards(step):
    job, manifest = step
    whole = read_state(files_of(job, manifest))
    assert {name: (t.dtype, t.shape) for name, t in whole.items()} == {
        "t1": ("F32", (3,)), "u1": ("I8", ()), "t2": ("F32", (3,)), "u2": ("I8", ())
    }  # fmt: skip
    assert bytes(whole["t2"].data) == np.full(3, 2, np.float32).tobytes()
    one_by_one = dict(iterate_state(files_of(job, manifest)))
    assert {name: bytes(t.data) for name, t in one_by_one.items()} == {
        name: bytes(t.data) for name, t in whole.items()
    }


@pytest.mark.parametrize("read", [read_state, lambda files: dict(iterate_state(files))])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_a_damaged_shard_is_refused_by_its_digest(step, read, damage):
    job, manifest = step
    path = f"{job.step(1)}/{manifest.shards[1].name}"
    data = bytearray(job.disk.read(path))
    if damage == "flip":
        data[-1] ^= 1
    job.disk.replace(path, bytes(data[:-1] if damage == "cut" else data + b"x" if damage == "grow" else data))
    with pytest.raises(CorruptDataError, match="digest"):
        read(files_of(job, manifest))


def test_no_tensor_is_yielded_before_all_shards_are_checked(step):
    job, manifest = step
    path = f"{job.step(1)}/{manifest.shards[1].name}"
    data = bytearray(job.disk.read(path))
    data[-1] ^= 1
    job.disk.replace(path, bytes(data))
    with pytest.raises(CorruptDataError):
        next(iterate_state(files_of(job, manifest)))


def test_two_shards_with_one_tensor_are_refused(tmp_path):
    job = Job.at(tmp_path)
    writer = StepWriter(job, 1, 2, "a")
    writer.begin()
    for rank in (1, 2):
        shard = writer.write(f"actor/{rank}.safetensors", save({"same": np.zeros(1)}), tensors=1)
        writer.receipt(rank, [shard])
    with pytest.raises(CorruptDataError, match="two shards"):
        read_state(files_of(job, writer.seal()))
