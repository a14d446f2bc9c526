"""Object stores by obstore: S3 and what speaks it. Its errors become errors of this project that say what to do."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import from_url

from syncd.errors import ConfigError, FencedError, StorageError, SyncdError, first_line
from syncd.parts.mirror.objects import Found, Listed
from syncd.parts.mirror.profiles import read_profile

_LONGEST = 200
_BATCH = 1000
"""Names of one request to delete."""

_CREDENTIALS_FOR = timedelta(minutes=5)
"""After this time the profile is read again: another program may have renewed what it holds."""

_TIMEOUT = "60s"
_RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}
"""The mirror itself waits and says why; a request alone must not hide an outage for minutes."""

_CHANGED = (exceptions.PreconditionError, exceptions.AlreadyExistsError)
_DENIED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_DURATION = re.compile(r" in [0-9.]+.?s, after [0-9]+ retries.*?(?= - |$)| in [0-9.]+.?s\b")
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_EXPIRED = (
    "ExpiredToken",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "InvalidToken",
)


class ObstoreObjects:
    """The objects below `address`, a prefix of a store such as s3://bucket/job.

    `store` is one of obstore whose root is that prefix; from the address and the environment unless given.
    """

    def __init__(self, address: str, store: Any = None) -> None:
        self.address = address.rstrip("/")
        self._store = store if store is not None else open_store(self.address)

    def get(self, name: str) -> Found:
        with self._explained(name):
            return _found(obstore.get(self._store, name))

    def get_changed(self, name: str, tag: Any) -> Found | None:
        if tag is None:
            return self.get(name)
        try:
            with self._explained(name):
                return _found(obstore.get(self._store, name, options={"if_none_match": tag["e_tag"]}))
        except _NotModified:
            return None

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        with self._explained(name):
            return bytes(obstore.get_range(self._store, name, start=offset, length=length))

    def modified(self, name: str) -> float:
        with self._explained(name):
            return float(obstore.head(self._store, name)["last_modified"].timestamp())

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._put(name, data, "create")
        except FencedError:
            return False
        return True

    def put(self, name: str, data: bytes) -> None:
        self._put(name, data, "overwrite")

    def replace(self, name: str, data: bytes, tag: Any) -> Any:
        try:
            return self._put(name, data, "create" if tag is None else tag)
        except FileNotFoundError:
            raise FencedError("somebody has deleted it", path=f"{self.address}/{name}") from None

    def list(self, prefix: str) -> list[Listed]:
        with self._explained(prefix):
            pages = obstore.list(self._store, prefix=prefix, chunk_size=1000)
            return [
                Listed(str(item["path"]), int(item["size"]), item["last_modified"].timestamp())
                for page in pages
                for item in page
            ]

    def delete(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _BATCH):
            with contextlib.suppress(FileNotFoundError), self._explained(names[first]):
                obstore.delete(self._store, list(names[first : first + _BATCH]))

    def _put(self, name: str, data: bytes, mode: Any) -> Any:
        with self._explained(name):
            return _tag(obstore.put(self._store, name, data, mode=mode, use_multipart=False))

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.address}/{name}") from None
        except exceptions.NotModifiedError:
            raise _NotModified from None
        except _CHANGED as error:
            raise FencedError("another mirror has written it", path=f"{self.address}/{name}") from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise explain(error, f"{self.address}/{name}") from error


class _NotModified(Exception):  # noqa: N818 - an answer and no error
    """The object is still the one that was read."""


def explain(error: Exception, where: str) -> SyncdError:
    whole = str(error)
    # How long it took differs each time, and the same reason is said once.
    text = _DURATION.sub("", (whole.splitlines() or [""])[0])[:_LONGEST]
    if isinstance(error, _DENIED) or any(word in whole for word in _EXPIRED):
        return ConfigError(
            f"the object store refuses the credentials: {text}",
            path=where,
            hint="aws sts get-caller-identity  # or renew what AWS_* or the profile holds",
        )
    return StorageError(
        f"the object store does not answer: {text}", path=where, hint=f"curl -sSI {_endpoint(where)}"
    )


def _endpoint(where: str) -> str:
    if where.startswith("gs"):
        return "https://storage.googleapis.com"
    named = (os.environ.get(name) for name in _ENDPOINTS)
    return next(filter(None, named), "https://s3.amazonaws.com")


def _found(result: Any) -> Found:
    meta = result.meta
    return Found(bytes(result.bytes()), _tag(meta), meta["last_modified"].timestamp())


def _tag(meta: Any) -> dict[str, str]:
    """Return what `replace` compares: obstore takes no version where the store gives none."""
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}


def open_store(address: str) -> Any:
    """Return the store of an address, with the credentials of the environment or of a profile.

    `AWS_*` of the environment count first, as everywhere. Without a key there, the profile `AWS_PROFILE` (or
    `default`) of the shared files is read, if they have one; else what the machine itself offers is asked.
    """
    options: dict[str, Any] = {"client_options": _client_options(), "retry_config": _RETRIES}
    if address.startswith("s3") and "AWS_ACCESS_KEY_ID" not in os.environ:
        options |= _profile_options()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if address.startswith("s3") and endpoint and "AWS_ENDPOINT" not in os.environ:
        options["endpoint"] = endpoint
    try:
        return from_url(address, **options)
    except (exceptions.BaseError, ValueError, OSError) as error:
        raise ConfigError(f"it cannot be opened: {first_line(error)[:_LONGEST]}", path=address) from error


def _client_options() -> dict[str, Any]:
    is_plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return {"timeout": _TIMEOUT, "connect_timeout": "10s", **({"allow_http": True} if is_plain else {})}


def _profile_options() -> dict[str, Any]:
    profile = read_profile()
    if profile is None:
        return {}
    names = {"region": "region", "endpoint_url": "endpoint"}
    options: dict[str, Any] = {names[key]: value for key, value in profile.items() if key in names}
    if "endpoint" in options and options["endpoint"].startswith("http://"):
        options["client_options"] = {**_client_options(), "allow_http": True}
    if "aws_access_key_id" in profile:
        options["credential_provider"] = _profile_credentials()
    return options


def _profile_credentials() -> Callable[[], dict[str, Any]]:
    def credentials() -> dict[str, Any]:
        profile = read_profile() or {}
        return {
            "access_key_id": profile.get("aws_access_key_id", ""),
            "secret_access_key": profile.get("aws_secret_access_key", ""),
            "token": profile.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
        }

    return credentials
