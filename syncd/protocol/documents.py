"""JSON documents of the protocol: encoding, bounded decoding, field checks and the format version.

Every document carries `protocol`. Unknown fields are ignored; a newer major is refused with what to upgrade.
"""

import dataclasses
import functools
import hashlib
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from syncd.errors import CorruptDataError, ProtocolTooNewError
from syncd.extras import upgrade_command
from syncd.protocol.disk import DOCUMENT_LIMIT, Disk, list_if_there

PROTOCOL = 1  # the major version of the on-disk format that this code writes and the newest that it reads

SMALL_LIMIT = 1 << 20
"""The largest document that says little, in bytes: a presence, a leader, a request, a pin, a member."""

MAX_INTEGER = 1 << 53  # integers stay exact in every JSON reader below this bound

Document = dict[str, Any]
T = TypeVar("T")


class Fields:
    """The checked fields of one decoded document; every getter raises `CorruptDataError` with the place."""

    def __init__(self, document: Mapping[str, Any], path: str) -> None:
        self.document = document
        self.path = path

    def wrong(self, key: str, expected: str) -> CorruptDataError:
        return CorruptDataError(f"field {key!r} is not {expected}", path=self.path)

    def integer(self, key: str, *, least: int = 0, most: int = MAX_INTEGER) -> int:
        """Return an integer field between `least` and `most`, 2**53 unless given."""
        value = self.document.get(key)
        if type(value) is not int or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        if value > most:
            raise self.wrong(key, f"an integer of at most {most}")
        return value

    def number(self, key: str) -> float:
        """Return a number between -2**53 and 2**53."""
        value = self.document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_INTEGER:
            raise self.wrong(key, "a finite number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or `default` where the field is missing and a default is given."""
        value = self.document.get(key, default)
        if type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.document.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def record(self, key: str) -> "Fields":
        value = self.document.get(key)
        if type(value) is not dict:
            raise self.wrong(key, "an object")
        return Fields(value, self.path)

    def optional_record(self, key: str) -> "Fields | None":
        """Return a nested object, or None where the field is missing or null."""
        return None if self.document.get(key) is None else self.record(key)

    def items(self, key: str) -> Sequence[Any]:
        """Return a list, empty where the field is missing."""
        value = self.document.get(key, [])
        if type(value) is not list:
            raise self.wrong(key, "a list")
        return value

    def records(self, key: str) -> list["Fields"]:
        values = self.items(key)
        if any(type(value) is not dict for value in values):
            raise self.wrong(key, "a list of objects")
        return [Fields(value, self.path) for value in values]

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers between 0 and 2**53."""
        values = self.items(key)
        if any(type(value) is not int or not 0 <= value <= MAX_INTEGER for value in values):
            raise self.wrong(key, "a list of non-negative integers")
        return tuple(values)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        if any(type(value) is not str for value in values):
            raise self.wrong(key, "a list of strings")
        return tuple(values)

    def counts(self, key: str) -> dict[str, int]:
        record = self.record(key)
        return {name: record.integer(name) for name in record.document}


def _optional(read: Callable[[Fields, str], T]) -> Callable[[Fields, str], T | None]:
    return lambda fields, key: None if fields.document.get(key) is None else read(fields, key)


_READERS: Mapping[Any, Callable[[Fields, str], Any]] = {
    int: Fields.integer,
    float: Fields.number,
    str: Fields.text,
    bool: Fields.flag,
    int | None: _optional(Fields.integer),
    float | None: _optional(Fields.number),
    str | None: _optional(Fields.text),
    tuple[int, ...]: Fields.integers,
    tuple[str, ...]: Fields.texts,
    dict[str, int]: Fields.counts,
    dict[str, Any]: lambda fields, key: dict(fields.record(key).document),
}


def record_from(kind: Callable[..., T], fields: Fields, /, *required: str, **values: Any) -> T:
    """Return a dataclass whose fields are those of an object, each checked by its type.

    Args:
        kind: The class. A field that has a default takes it where the document has none, or null.
        *required: Fields that must be there although the class has a default for them.
        **values: Fields that the caller has read.
    """
    document = fields.document
    for name, read, has_default in _readers(kind):
        takes_default = has_default and document.get(name) is None and name not in required
        if name not in values and not takes_default:
            values[name] = read(fields, name)
    return kind(**values)


def record_in(kind: Callable[..., T], info: Mapping[str, Any], key: str, /, *required: str) -> T | None:
    """Return the dataclass that a field of a presence's `info` holds, None if it holds none that can be read."""
    try:
        return record_from(kind, Fields(info, key).record(key), *required)
    except CorruptDataError:
        return None


@functools.cache
def _readers(kind: Any) -> list[tuple[str, Callable[[Fields, str], Any], bool]]:
    """Return the name of each field of a dataclass, how it is read, and whether it has a default."""
    return [
        (field.name, _READERS.get(field.type) or _reader(field.type), _has_default(field))
        for field in dataclasses.fields(kind)
    ]


def _reader(kind: Any) -> Callable[[Fields, str], Any]:
    """Return how a nested object is read: by `from_fields` of its class if that has one, else field by field."""
    if isinstance(kind, types.UnionType):
        return _optional(_reader(kind.__args__[0]))
    own = getattr(kind, "from_fields", None)
    return functools.partial(_nested, kind) if own is None else lambda fields, key: own(fields.record(key))


def _nested(kind: Any, fields: Fields, key: str) -> Any:
    # A nested object was never written without one of its fields.
    return record_from(kind, fields.record(key), *(field.name for field in dataclasses.fields(kind)))


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


def as_document(record: Any, *leave_out: str, **changed: Any) -> Document:
    """Return the fields of a dataclass as a document, some left out and some in another form."""
    document = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)} | changed
    return {key: value for key, value in document.items() if key not in leave_out}


def without_none(document: Document, *names: str) -> Document:
    """Return a document without some fields where they are None: documents that lack them keep their bytes."""
    return {key: value for key, value in document.items() if key not in names or value is not None}


def encode(document: Mapping[str, Any]) -> bytes:
    """Return a document as the one JSON text that equal documents share, newline at the end."""
    document = {"protocol": PROTOCOL, **document}
    text = _text(document)
    # A path that is no UTF-8 has half surrogate pairs: written as they are, nobody could read the document.
    return (_text(spelt(document)) if "\\ud" in text else text).encode() + b"\n"


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def spelt(value: Any) -> Any:
    """Return a value whose texts have half surrogate pairs spelt out, which `decode` refuses."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {spelt(key): spelt(item) for key, item in value.items()}
    return [spelt(item) for item in value] if isinstance(value, list | tuple) else value


def decode(data: bytes, path: str) -> Fields:
    """Parse a document and check its format version."""
    try:
        document = _parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"not a JSON document ({type(error).__name__})", path=path) from None
    if type(document) is not dict:
        raise CorruptDataError("not a JSON object", path=path)
    fields = Fields(document, path)
    written_by = fields.integer("protocol", least=1)
    if written_by > PROTOCOL:
        raise ProtocolTooNewError(
            f"written by protocol {written_by}, this is protocol {PROTOCOL}: upgrade syncd",
            path=path,
            hint=upgrade_command(),
        )
    return fields


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text of others says; `ValueError` if it is none, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse(text: str) -> Any:
    value = _DECODER.decode(text)
    if "\\ud" in text.lower():
        # Half a surrogate pair is no text: the first one to print it or to write it would fail.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""One for all: thousands of small documents a second are read, and to make one takes as long as to use it."""


def read_document(disk: Disk, path: str, limit: int = DOCUMENT_LIMIT) -> Fields:
    """Read and parse one document of at most `limit` bytes; a missing file stays `FileNotFoundError`."""
    return decode(disk.read(path, limit), path)


def write_document(disk: Disk, path: str, document: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a document durably, in a directory that is made where it is missing."""
    disk.make_directory(path.rpartition("/")[0])
    disk.replace(path, encode(document), private=private)


def list_documents(disk: Disk, directory: str) -> Iterator[tuple[str, str]]:
    """Yield name, without `.json`, and path of each document in a directory; nothing if it is missing."""
    for entry in list_if_there(disk, directory):
        if entry.kind == "file" and entry.name.endswith(".json"):
            yield entry.name.removesuffix(".json"), f"{directory}/{entry.name}"


def seal(document: Mapping[str, Any]) -> Document:
    """Return the document with its own digest in `digest`: SHA-256 over its encoding without that field."""
    body = {"protocol": PROTOCOL, **document}
    return {**body, "digest": f"sha256:{hashlib.sha256(encode(body)).hexdigest()}"}


def check_seal(fields: Fields) -> str:
    """Return the document's own digest."""
    stated = fields.text("digest")
    body = {key: value for key, value in fields.document.items() if key != "digest"}
    try:
        own = seal(body)["digest"]
    except RecursionError:
        own = None
    if own != stated:
        raise CorruptDataError("content does not match its own digest", path=fields.path)
    return stated
