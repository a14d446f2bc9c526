"""Loading into tensors that exist: real files, read through the page cache and past it, of all kinds of torch."""

import os

import pytest

torch = pytest.importorskip("torch", reason="loading into parameters needs torch")

from safetensors.torch import save_file  # noqa: E402
from support.held import held  # noqa: E402
from support.targets import target_of  # noqa: E402

from syncd.errors import ConfigError, LoadFailedError, RefusedError  # noqa: E402
from syncd.protocol.mount import mount_of  # noqa: E402
from syncd.transports.files import read_file  # noqa: E402
from syncd.transports.files.fill_tensors import check_fit, load  # noqa: E402
from syncd.transports.files.read_file import cached_share  # noqa: E402
from syncd.transports.torch_tensors import TO_TORCH, target_tensors  # noqa: E402


def noise(*shape, dtype=torch.float32):
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2, shape).to(dtype)


def same(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def some_weights():
    """Return tensors of all dtypes and odd sizes, empty ones and 0-dim ones among them."""
    found = {f"kind.{name}": noise(3, 7, dtype=dtype) for name, dtype in TO_TORCH.items()}
    found |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(2.5), "byte": noise(1, dtype=torch.int8)}
    return found | {"large": noise(3000, 1001), "half": noise(1500, 999, dtype=torch.bfloat16)}


def write(directory, weights, shards=1, pair=(1, 5), **more):
    os.makedirs(directory, exist_ok=True)
    names = list(weights)
    for number in range(shards):
        part = {name: weights[name].contiguous() for name in names[number::shards]}
        save_file(part, f"{directory}/model-{number + 1:05d}-of-{shards:05d}.safetensors")
    return target_of(directory, pair, **more)


def blank(weights):
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def filled(target, tensors, **more):
    place = target_tensors(tensors)
    return load(target, place, check_fit(target, place), **more)


@pytest.fixture(params=["cached", "direct"])
def way(request, monkeypatch):
    """Have every file read in one way; skip what this file system refuses."""
    monkeypatch.setattr(read_file, "cached_share", lambda *_: 1.0 if request.param == "cached" else 0.0)
    return request.param


def require_way(loaded, way, files):
    if way == "direct" and not loaded.direct:
        pytest.skip("this file system does not read past the page cache")
    assert (loaded.direct, loaded.cached) == ((files, 0) if way == "direct" else (0, files))


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "hashed"])
@pytest.mark.parametrize("shards", [1, 3])
def test_all_tensors_are_filled(tmp_path, way, shards, verified):
    weights = some_weights()
    target = write(tmp_path, weights, shards, verified=verified)
    tensors = blank(weights)
    loaded = filled(target, tensors)
    assert all(same(tensors[name], weights[name]) for name in weights)
    require_way(loaded, way, shards)
    size = sum(record.size for record in target.shards)
    assert loaded.bytes == (sum(one.nbytes for one in weights.values()) if verified else size)


@pytest.mark.parametrize("padding", range(1, 8))
def test_unaligned_shard_data_is_read_correctly(tmp_path, way, padding):
    weights = {"a": noise(700, 1000), "b": noise(30), "c": noise(5, dtype=torch.float64)}
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    path.write_bytes((length + padding).to_bytes(8, "little") + header + b" " * padding + data)
    target = target_of(tmp_path, (1, 1), verified=False)
    tensors = {
        "a": torch.zeros(1000, 700).t(),
        "b": torch.zeros(30, dtype=torch.bfloat16),
        "c": torch.zeros(5).double(),
    }
    filled(target, tensors)
    assert torch.equal(tensors["a"], weights["a"])
    assert torch.equal(tensors["b"], weights["b"].bfloat16())
    assert torch.equal(tensors["c"], weights["c"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_different_float_dtype_is_cast(tmp_path, way, dtype):
    weights = {"w": noise(1100, 1013, dtype=torch.bfloat16), "s": torch.tensor(1.5)}
    target = write(tmp_path, weights, verified=False)
    tensors = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in weights.items()}
    filled(target, tensors)
    assert all(torch.equal(tensors[name], weights[name].to(dtype)) for name in weights)


def test_a_different_dtype_is_refused_without_cast(tmp_path):
    target = write(tmp_path, {"w": noise(2, dtype=torch.bfloat16)})
    with pytest.raises(RefusedError, match=r"BF16\[2\] instead of F32"):
        check_fit(target, target_tensors({"w": torch.zeros(2)}), cast=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_any_strides_are_filled(tmp_path, way, dtype):
    weights = {"t": noise(1500, 1201), "rows": noise(40, 30), "four": noise(3, 5, 7, 11), "flip": noise(9000)}
    target = write(tmp_path, weights, verified=False)
    base = torch.zeros(40, 60, dtype=dtype)
    tensors = {
        "t": torch.zeros(1201, 1500, dtype=dtype).t(),
        "rows": base[:, 15:45],
        "four": torch.zeros(3, 5, 7, 11, dtype=dtype).to(memory_format=torch.channels_last),
        "flip": torch.zeros(18000, dtype=dtype)[::2],
    }
    assert not any(tensor.is_contiguous() for tensor in tensors.values())
    filled(target, tensors)
    assert all(torch.equal(tensors[name], weights[name].to(dtype)) for name in weights)
    assert not base[:, :15].any()
    assert not base[:, 45:].any()


def test_tied_tensors_are_filled_by_either_name(tmp_path):
    weights = {"embed": noise(30, 20), "head": noise(30, 20)}
    for number, names in enumerate((["embed"], ["head"], ["embed", "head"])):
        tied = torch.zeros(30, 20)
        target = write(tmp_path / str(number), {name: weights[name] for name in names}, verified=False)
        filled(target, {"embed": tied, "head": tied})
        assert torch.equal(tied, weights[names[0]])


def test_parts_of_one_storage_are_not_taken_for_tied(tmp_path):
    both = torch.zeros(2, 8)
    weights = {"upper": noise(8), "lower": noise(8)}
    filled(write(tmp_path, weights), {"upper": both[0], "lower": both[1]})
    assert torch.equal(both, torch.stack([weights["upper"], weights["lower"]]))


def test_parameters_that_require_gradients_are_filled_in_place(tmp_path, way):
    layer = torch.nn.Linear(50, 40)
    weights = {"weight": noise(40, 50), "bias": noise(40, dtype=torch.float64)}
    address = layer.weight.data_ptr()
    filled(write(tmp_path, weights, verified=False), layer.state_dict(keep_vars=True))
    assert torch.equal(layer.weight, weights["weight"])
    assert torch.equal(layer.bias, weights["bias"].float())
    assert layer.weight.data_ptr() == address


def damage(target, how):
    path = f"{target.path}/{target.shards[-1].name}"
    size = os.path.getsize(path)
    if how == "cut":
        os.truncate(path, size - 1)
    elif how == "longer":
        os.truncate(path, size + 1)
    elif how == "gone":
        os.unlink(path)
    elif how == "pipe":
        os.unlink(path)
        os.mkfifo(path)
    elif how == "link":
        os.rename(path, f"{path}.moved")
        os.symlink(f"{path}.moved", path)
    else:
        with open(path, "r+b") as file:
            file.seek(size - 1)
            last = file.read(1)
            file.seek(size - 1)
            file.write(bytes([last[0] ^ 1]))


@pytest.mark.parametrize("how", ["cut", "longer", "gone", "pipe", "link", "flipped"])
def test_a_file_damaged_after_the_check_is_a_failed_load(tmp_path, way, how):
    weights = {"a": noise(2000, 700), "b": noise(2000, 700)}
    target = write(tmp_path, weights, shards=2, verified=False)
    place = target_tensors(blank(weights))
    found = check_fit(target, place)
    damage(target, how)
    with pytest.raises(LoadFailedError, match=r"1\.5") as failed:
        load(target, place, found)
    assert target.path in str(failed.value)


def test_a_shard_replaced_after_the_check_leaves_the_tensors_unchanged(tmp_path):
    target = write(tmp_path, {"a": noise(40, 10)}, verified=False)
    tensors = blank({"a": noise(40, 10)})
    place = target_tensors(tensors)
    found = check_fit(target, place)
    save_file({"a": noise(10, 40)}, f"{tmp_path}/{target.shards[0].name}")
    with pytest.raises(LoadFailedError, match="has changed since"):
        load(target, place, found)
    assert not tensors["a"].any()


def test_a_failed_load_leaves_no_thread_and_no_open_file(tmp_path, way):
    weights = {"a": noise(2000, 2000), "b": noise(2000, 2000)}
    target = write(tmp_path, weights, shards=2, verified=False)
    place = target_tensors(blank(weights))
    found = check_fit(target, place)
    damage(target, "flipped")
    before = held()
    with pytest.raises(LoadFailedError):
        load(target, place, found)
    assert held() <= before


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": noise(3)}, "'b' is missing"),
        ({"a": noise(3), "b": noise(2, 2), "c": noise(1)}, "'c' is not expected"),
        ({"a": noise(4), "b": noise(2, 2)}, r"'a' is F32\[4\] instead of F32\[3\]"),
        ({f"x{number}": noise(1) for number in range(9)}, "and 8 more"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, weights, says):
    target = write(tmp_path, weights)
    with pytest.raises(RefusedError, match=says):
        check_fit(target, target_tensors({"a": torch.zeros(3), "b": torch.zeros(2, 2)}))


def test_a_version_without_records_is_read_from_its_directory(tmp_path):
    weights = {"a": noise(30), "b": noise(20)}
    known = write(tmp_path, weights, shards=2)
    (tmp_path / ".part.safetensors").write_bytes(b"not one")
    bare = type(known)(known.version, known.path)
    tensors = blank(weights)
    filled(bare, tensors)
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.zeros(3).to_sparse()])
def test_meta_and_sparse_tensors_are_refused(tensor):
    with pytest.raises(ConfigError, match="cannot be filled"):
        target_tensors({"w": tensor})


def test_the_cached_share_of_a_file_is_measured(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        assert cached_share(file.fileno(), 1 << 20) == 1.0
        if mount_of(str(tmp_path)).type == "tmpfs":
            pytest.skip("what is here is always in memory")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert cached_share(file.fileno(), 1 << 20) < 0.5


def test_without_cachestat_the_cached_share_is_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(read_file, "_cached_pages", lambda _: None)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with open(path, "rb") as file:
        assert cached_share(file.fileno(), 1 << 20) == 1.0
    assert cached_share(-1, 5) == 1.0
    assert cached_share(-1, 0) == 1.0
