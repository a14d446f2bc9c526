"""The model that an adapter belongs to: its digest, its place in a manifest, and what retention makes of it."""

import json
import os
import shutil

import pytest

from syncd.daemon.examine import examine_native
from syncd.errors import ConfigError, CorruptDataError, UsageError
from syncd.protocol.adapter_base import BLOCK, SAMPLED, AdapterBase, find_base, model_digest
from syncd.protocol.documents import encode, seal
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.manifest import decode_manifest, encode_manifest, read_manifest
from syncd.protocol.safetensors import encode_header
from syncd.protocol.writer import StepWriter

BASE = AdapterBase("xxh3_128:0a", "/models/base", 3)


class CountingDisk(LocalDisk):
    """Counts the bytes that are read at offsets."""

    def __init__(self):
        self.read_bytes = 0

    def read_at(self, path, offset, length):
        found = super().read_at(path, offset, length)
        self.read_bytes += len(found)
        return found


def write_shard(path, tensors):
    """Write a safetensors file of byte tensors."""
    header = encode_header([(name, "U8", (len(data),), len(data)) for name, data in tensors.items()])
    with open(path, "wb") as file:
        file.write(header + b"".join(tensors.values()))


@pytest.fixture
def tensors():
    return {f"layer.{number}": bytes([number]) * (3 * BLOCK + number) for number in range(4)}


@pytest.fixture
def model(tmp_path, tensors):
    path = tmp_path / "model"
    path.mkdir()
    write_shard(path / "model.safetensors", tensors)
    return str(path)


def digest(path):
    return model_digest(LocalDisk(), str(path))


def test_a_model_has_one_digest_however_its_tensors_are_divided_into_files(tmp_path, model, tensors):
    divided = tmp_path / "divided"
    divided.mkdir()
    names = sorted(tensors, reverse=True)
    weight_map = {}
    for number, part in enumerate((names[:1], names[1:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        write_shard(divided / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (divided / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    (divided / "consolidated.safetensors").write_bytes(b"of nobody's concern")
    assert digest(divided) == digest(model)
    assert digest(model).startswith("xxh3_128:")


def test_a_directory_of_links_has_the_digest_of_what_they_lead_to(tmp_path, model):
    linked = tmp_path / "linked"
    linked.mkdir()
    os.symlink(f"{model}/model.safetensors", linked / "model.safetensors")
    os.symlink(linked, tmp_path / "again")
    assert digest(tmp_path / "again") == digest(model)


@pytest.mark.parametrize("place", [0, 1, BLOCK - 1, -1, -BLOCK])
def test_another_byte_in_a_block_is_another_model(tmp_path, model, tensors, place):
    other = tmp_path / "other"
    other.mkdir()
    changed = bytearray(tensors["layer.2"])
    changed[place] ^= 1
    write_shard(other / "model.safetensors", tensors | {"layer.2": bytes(changed)})
    assert digest(other) != digest(model)


def test_another_name_or_dtype_is_another_model(tmp_path, model, tensors):
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    write_shard(renamed / "model.safetensors", {f"{name}.weight": data for name, data in tensors.items()})
    cast = tmp_path / "cast"
    shutil.copytree(model, cast)
    path = cast / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"I8"'))
    assert len({digest(found) for found in (model, renamed, cast)}) == 3


def test_the_cost_is_bounded_for_every_size_of_model(tmp_path):
    path = tmp_path / "large"
    path.mkdir()
    many = {f"expert.{number:05}": bytes(2 * BLOCK) for number in range(3 * SAMPLED)}
    write_shard(path / "model.safetensors", many)
    disk = CountingDisk()
    model_digest(disk, str(path))
    header = os.path.getsize(path / "model.safetensors") - 3 * SAMPLED * 2 * BLOCK
    assert disk.read_bytes <= SAMPLED * 3 * BLOCK + header + (1 << 17)


@pytest.mark.parametrize("content", [None, b"", b"\x10\0\0\0\0\0\0\0{}"])
def test_a_model_that_is_not_whole_safetensors_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors"):
        digest(tmp_path)


def test_a_base_is_a_step_of_the_job_if_it_lies_in_one(tmp_path, model):
    job = Job.at(str(tmp_path))
    assert find_base(job, model) == AdapterBase(digest(model), model)
    actor = shutil.copytree(model, tmp_path / "global_step_7" / "actor")
    assert find_base(job, str(actor)) == AdapterBase(digest(model), str(actor), 7)
    os.symlink(actor, tmp_path / "start")
    assert find_base(job, str(tmp_path / "start")).step == 7


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(str(tmp_path / "job"))


def written(job, step, base=None, kind=""):
    writer = StepWriter(job, step, 1, "attempt", base=base)
    writer.begin()
    header = encode_header([("a.lora_A.weight", "U8", (1,), 1)])
    shard = writer.write("actor/adapter_model.safetensors", header + b"x", tensors=1)
    writer.receipt(1, [shard])
    writer.seal(kind=kind)
    return read_manifest(job.disk, job.step(step))


def test_a_writer_with_a_base_seals_an_adapter_that_names_it(job):
    manifest = written(job, 5, BASE)
    assert (manifest.kind, manifest.base, manifest.parent) == ("lora", BASE, 3)
    assert decode_manifest(encode_manifest(manifest), "/a") == manifest
    assert b'"base"' not in encode_manifest(written(job, 6, kind="lora"))


def test_retention_and_the_version_know_the_step_that_an_adapter_changes(job):
    """The rule `chain` keeps what `parent` names, as it does for deltas."""
    written(job, 5, BASE)
    found = examine_native(job.disk, job.root, 5)
    assert (found.kind, found.parent) == ("lora", 3)


@pytest.mark.parametrize(
    ("base", "kind", "problem"),
    [
        (BASE, "weights", "with the base of an adapter"),
        (AdapterBase("xxh3_128:0a", "/models/base", 5), "lora", "an adapter of a later step, 5"),
    ],
)
def test_a_manifest_that_contradicts_its_base_is_refused(job, base, kind, problem):
    with pytest.raises(UsageError, match=problem):
        written(job, 5, base, kind)


@pytest.mark.parametrize("change", [(b"xxh3_128:0a", b"xxh3_128:zz"), (b'"step":3', b'"step":-1')])
def test_a_damaged_base_is_damage(job, change):
    document = json.loads(encode_manifest(written(job, 5, BASE)).replace(*change))
    document.pop("digest")
    with pytest.raises(CorruptDataError):
        decode_manifest(encode(seal(document)), "/a")
