"""What gets the bytes of a version for a stage: one contract for the origin and for all that packages register."""

import os

import pytest
from support.deltas import SmallModel, contents

from syncd.client.client import Client
from syncd.errors import RefusedError, TryAgainError
from syncd.protocol.manifest import read_manifest
from syncd.publishing import FollowingDisk, publish_export, read_export
from syncd.registered import registered
from syncd.transports.files.leased_directory import payload_of
from syncd.transports.files.piece_reader import GROUP, ORIGIN, ReaderContext, WantedFiles, open_reader
from syncd.transports.files.stage import HostStage


@pytest.fixture
def client(tmp_path):
    (tmp_path / "job").mkdir()
    with Client.open(str(tmp_path / "job"), "explorer", "e0") as client:
        yield client


@pytest.fixture(params=["origin", *registered(GROUP)])
def reader(request, tmp_path, client):
    if request.param == "origin":
        yield ORIGIN
        return
    stage = HostStage(str(tmp_path / "stage"), client.job.root)
    context = lambda address: ReaderContext(address, client, stage.directory, lambda *_, **__: None)  # noqa: E731
    os.makedirs(stage.directory, exist_ok=True)
    made = open_reader(f"{request.param}=127.0.0.1:0", context)
    yield made
    made.close()


@pytest.fixture
def wanted(client, tmp_path):
    export = read_export(FollowingDisk(), SmallModel().export(tmp_path / "export"))
    publish_export(client.job, 1, FollowingDisk(), export)
    manifest = read_manifest(client.job.disk, client.job.step(1))
    records = payload_of(manifest).records
    return WantedFiles(client.job.disk, f"{client.job.step(1)}/actor", records, manifest.digest)


def test_it_writes_every_file_into_a_new_directory(reader, wanted, tmp_path):
    reader.copy(wanted, str(tmp_path / "copy"), lambda: False)
    assert contents(tmp_path / "copy") == contents(tmp_path / "export")


def test_it_adds_files_to_a_directory_that_is_there(reader, wanted, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/early").write_bytes(b"moved")
    reader.copy(wanted, str(tmp_path / "copy"), lambda: False)
    assert contents(tmp_path / "copy") == {**contents(tmp_path / "export"), "early": b"moved"}


def test_it_refuses_a_file_of_other_bytes(reader, wanted, tmp_path):
    path = f"{wanted.directory}/model-00001-of-00002.safetensors"
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"wrong")
    with pytest.raises(RefusedError, match="digest"):
        reader.copy(wanted, str(tmp_path / "copy"), lambda: False)


def test_it_gives_up_when_it_is_told_to(reader, wanted, tmp_path):
    with pytest.raises(TryAgainError):
        reader.copy(wanted, str(tmp_path / "copy"), lambda: True)


def test_a_missing_file_is_missing(reader, wanted, tmp_path):
    os.unlink(f"{wanted.directory}/config.json")
    with pytest.raises(FileNotFoundError):
        reader.copy(wanted, str(tmp_path / "copy"), lambda: False)


def test_it_closes_twice(reader):
    reader.close()
    reader.close()
