"""The contract of object stores: the one in memory that tests use, obstore's, and obstore before moto's S3."""

import os

import pytest
from support.mirrors import MemoryObjects
from support.s3 import SERVER, environment_of, running_s3

from syncd.errors import ConfigError, FencedError, StorageError

obstore_objects = pytest.importorskip(
    "syncd.parts.mirror.obstore_objects", reason="the extra mirror is missing"
)


@pytest.fixture(scope="module")
def s3():
    if os.environ.get("SYNCD_S3") != "1" or not SERVER.exists():
        pytest.skip("moto is for make test-mirror")
    with running_s3() as url:
        yield url


@pytest.fixture(params=["memory", "obstore", "s3"])
def objects(request, monkeypatch):
    if request.param == "memory":
        return MemoryObjects()
    if request.param == "obstore":
        from obstore.store import MemoryStore

        return obstore_objects.ObstoreObjects("s3://bucket/job", MemoryStore())
    for name, value in environment_of(request.getfixturevalue("s3")).items():
        monkeypatch.setenv(name, value)
    return obstore_objects.ObstoreObjects(f"s3://weights/{request.node.name}")


def test_an_object_is_created_once_and_replaced_by_who_has_read_it(objects):
    assert objects.create("a/b", b"one")
    assert not objects.create("a/b", b"two")
    found = objects.get("a/b")
    assert found.data == b"one"
    assert objects.get_changed("a/b", found.tag) is None
    tag = objects.replace("a/b", b"three", found.tag)
    with pytest.raises(FencedError):
        objects.replace("a/b", b"four", found.tag)
    with pytest.raises(FencedError):
        objects.replace("a/b", b"four", None)
    assert objects.get_changed("a/b", found.tag).data == b"three"
    objects.replace("a/b", b"five", tag)
    assert objects.get_range("a/b", 1, 2) == b"iv"
    assert objects.modified("a/b") >= found.modified


def test_listings_are_below_a_prefix_and_deletions_of_what_is_gone_are_fine(objects):
    for number in range(1100):
        objects.put(f"steps/1-a/{number:05d}", b"x")
    objects.put("steps/1-ab/manifest.json", b"{}")
    listed = objects.list("steps/1-a/")
    assert sorted(one.name for one in listed) == [f"steps/1-a/{number:05d}" for number in range(1100)]
    assert {one.size for one in listed} == {1}
    objects.delete([one.name for one in listed])
    objects.delete(["steps/1-a/00000", "never"])
    assert objects.list("steps/1-a/") == []
    assert [one.name for one in objects.list("steps/")] == ["steps/1-ab/manifest.json"]


def test_what_is_missing_is_a_missing_file(objects):
    for call in (objects.get, objects.modified, lambda name: objects.get_range(name, 0, 1)):
        with pytest.raises(FileNotFoundError):
            call("nowhere")


def test_refused_credentials_and_a_store_that_is_down_say_what_to_do(monkeypatch):
    denied = obstore_objects.explain(obstore_objects.exceptions.PermissionDeniedError("403"), "s3://b/j")
    assert isinstance(denied, ConfigError)
    expired = obstore_objects.explain(
        obstore_objects.exceptions.GenericError("Generic S3 error: <Code>ExpiredToken</Code>"), "s3://b/j"
    )
    assert "credentials" in expired.message
    said = {
        obstore_objects.explain(
            obstore_objects.exceptions.GenericError(
                f"Error performing GET http://h/b/v.json in {time}, after 2 retries, max_retries: 2  - HTTP error: x"
            ),
            "s3://b/j",
        ).message
        for time in ("802.5ms", "1.2s", "90µs")
    }
    assert said == {
        "the object store does not answer: Error performing GET http://h/b/v.json - HTTP error: x"
    }
    for name, value in environment_of("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match="does not answer"):
        obstore_objects.ObstoreObjects("s3://weights/a").get("version.json")


def test_a_profile_of_the_shared_files_is_read_again_and_gives_keys_region_and_endpoint(
    tmp_path, monkeypatch
):
    from syncd.parts.mirror.profiles import read_profile

    (tmp_path / "config").write_text("[profile far]\nregion = eu-1\nendpoint_url = http://127.0.0.1:1\n")
    (tmp_path / "credentials").write_text("[far]\naws_access_key_id = A\naws_secret_access_key = S\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "far")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    options = obstore_objects._profile_options()
    assert (options["region"], options["endpoint"]) == ("eu-1", "http://127.0.0.1:1")
    assert options["credential_provider"]()["access_key_id"] == "A"
    (tmp_path / "credentials").write_text("[far]\naws_access_key_id = B\naws_secret_access_key = S\n")
    assert options["credential_provider"]()["access_key_id"] == "B"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert read_profile() is None
    assert obstore_objects._profile_options() == {}
