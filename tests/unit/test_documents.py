"""Documents: encoding, checks of fields, seals, and what every reader does with bytes that anybody wrote."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MemoryDisk, memory_job

from syncd.errors import CorruptDataError, ProtocolTooNewError, SyncdError
from syncd.extras import upgrade_command
from syncd.protocol.delta_header import DeltaHeader
from syncd.protocol.digest import digest_bytes
from syncd.protocol.documents import (
    MAX_INTEGER,
    PROTOCOL,
    Fields,
    check_seal,
    decode,
    encode,
    read_document,
    record_from,
    record_in,
    seal,
)
from syncd.protocol.leadership import read_leader
from syncd.protocol.manifest import Manifest, decode_manifest, encode_manifest
from syncd.protocol.presence import Presence, read_presence, read_presences, write_presence
from syncd.protocol.probe import Probe, encode_probe, read_base_probe
from syncd.protocol.receipt import FileRecord, Receipt, read_receipt, read_receipts, write_receipt
from syncd.protocol.rendezvous import (
    Acknowledgement,
    Offer,
    read_acknowledgements,
    read_offer,
    write_acknowledgement,
    write_offer,
)
from syncd.protocol.request import Pin, Request, read_pins, read_requests, write_pin, write_request
from syncd.protocol.version import (
    GoodVersion,
    Quarantined,
    Version,
    encode_version,
    read_marker,
    read_version,
)

RECORD = FileRecord("actor/model.safetensors", 3, digest_bytes(b"abc"), 1)
STEP = "/job/global_step_7"


def _written(write) -> tuple[str, bytes]:
    job = memory_job()
    write(job)
    ((path, data),) = job.disk.files.items()
    return path, data


def _leader() -> bytes:
    process = {"boot": "b", "namespace": "n", "pid": 1, "started": 2}
    return encode(
        {"identity": "i", "host": "h", "process": process, "beat": 1, "released": False, "floor": None}
    )


PROBE = Probe(((5, 6, 7), (1, 0)), ((-0.5, -2.25), (-11.0,)), "float32", "bfloat16")
MANIFEST = Manifest(
    7, 1, "run", (RECORD,), kind="delta", delta=DeltaHeader(6, "sha256:00", "topk", 1, 9), probe=PROBE
)
RECEIPT = Receipt(7, "run", 1, 2, (RECORD,), probe=PROBE)
VERSION = Version(
    1,
    7,
    "weights",
    "global_step_7/actor",
    "sha256:00",
    previous=(1, 6),
    abandoned=((9, "sha256:1"),),
    quarantine=(Quarantined(7, "sha256:00", "damaged"),),
    released=((5, "sha256:2"),),
    last_good=GoodVersion(1, 6, "weights", "global_step_6/actor", "sha256:3"),
)
OFFER = Offer("group", 3, "127.0.0.1", 1234, "gloo", 2, ("e1",), (("w", "F32", (2, 3)),))
DOCUMENTS = {
    "receipt": _written(lambda job: write_receipt(job.disk, STEP, RECEIPT)),
    "manifest": (f"{STEP}/manifest.json", encode_manifest(MANIFEST)),
    "version": ("/job/.syncd/version.json", encode_version(VERSION)),
    "presence": _written(
        lambda job: write_presence(job.disk, job.explorers, Presence("e1", answered={"a": 1}))
    ),
    "request": _written(lambda job: write_request(job, Request("rollback", 7, "r1"))),
    "pin": _written(lambda job: write_pin(job, Pin(7, "best"))),
    "offer": _written(lambda job: write_offer(job, OFFER)),
    "acknowledgement": _written(
        lambda job: write_acknowledgement(job, "group", 3, Acknowledgement("e1", "joined"))
    ),
    "leader": ("/job/.syncd/daemon.lock/0000000001/leader.json", _leader()),
    "baseline": ("/job/.syncd/base_probe.json", encode_probe(PROBE, model="/models/start")),
    "marker": ("/job/latest_state_dict_iteration.txt", b"7"),
}
PRESENCES = "/job/.syncd/explorers"


def read_as(kind: str, data: bytes) -> list[object]:
    """Give a document to each function that reads its kind."""
    path = DOCUMENTS[kind][0]
    job = memory_job({path: data})
    readers = {
        "receipt": [lambda: read_receipts(job.disk, STEP), lambda: read_receipt(job.disk, path)],
        "manifest": [lambda: decode_manifest(data, path)],
        "version": [lambda: read_version(job)],
        "presence": [lambda: read_presences(job.disk, PRESENCES), lambda: read_presence(job.disk, path)],
        "request": [lambda: read_requests(job)],
        "pin": [lambda: read_pins(job)],
        "offer": [lambda: read_offer(job, "group", 3)],
        "acknowledgement": [lambda: read_acknowledgements(job, "group", 3)],
        "leader": [lambda: read_leader(job, 1)],
        "baseline": [lambda: read_base_probe(job)],
        "marker": [lambda: read_marker(job.disk, job.marker)],
    }
    return [reader() for reader in readers[kind]]


def refuses_only_as_it_may(kind: str, data: bytes) -> None:
    try:
        read_as(kind, data)
    except SyncdError as error:
        message = str(error)
        message.encode()
        if "\n" in message:
            pytest.fail(f"not one line: {message!r}")


KINDS = st.sampled_from(sorted(DOCUMENTS))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [10**400, -(10**400), MAX_INTEGER + 1, float("nan"), float("inf"), 1e308, "\ud800", "../../x"]
    )
    | st.floats()
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_each_kind_of_document_is_read_with_all_its_fields(kind):
    assert all(found not in (None, (), [], {}) for found in read_as(kind, DOCUMENTS[kind][1]))


@given(KINDS, st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_with_a_known_error(kind, data):
    refuses_only_as_it_may(kind, data)


@given(KINDS, VALUES)
def test_arbitrary_json_is_refused_with_a_known_error(kind, value):
    refuses_only_as_it_may(kind, json.dumps(value).encode())


@settings(max_examples=600)
@given(st.sampled_from(sorted(DOCUMENTS.keys() - {"marker"})), st.data())
def test_an_arbitrary_value_in_any_field_raises_only_known_errors(kind, draw):
    document = json.loads(DOCUMENTS[kind][1])
    place = document
    while True:
        key = draw.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.just(0))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner and draw.draw(st.booleans())):
            break
        place = inner
    place[key] = draw.draw(VALUES)
    refuses_only_as_it_may(kind, json.dumps(document).encode())
    if kind == "manifest":
        document.pop("digest")
        text = json.dumps(document)
        if "NaN" not in text and "Infinity" not in text:
            refuses_only_as_it_may(kind, encode(seal(document)))


@settings(max_examples=600)
@given(KINDS, st.data())
def test_damage_anywhere_raises_only_known_errors(kind, draw):
    data = DOCUMENTS[kind][1]
    at = draw.draw(st.integers(0, len(data)))
    until = draw.draw(st.integers(at, len(data)))
    refuses_only_as_it_may(kind, data[:at] + draw.draw(st.binary(max_size=3)) + data[until:])


@pytest.mark.parametrize("kind", sorted(DOCUMENTS.keys() - {"marker"}))
@pytest.mark.parametrize("bomb", [b'{"a":' * 100_000, b"[" * 100_000, b'{"a":%s}' % (b"9" * 100_000)])
def test_json_bombs_raise_only_known_errors(kind, bomb):
    refuses_only_as_it_may(kind, bomb)


DEEP = '{"protocol":1,"digest":"sha256:0","x":' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[]", "1", '"x"', "\ufeff{}", '{"protocol":1,"x":NaN}', '{"protocol":1,"x":-Infinity}']
    + ['{"protocol":1,"x":1e999}', '{"protocol":1,"x":"\\ud800"}', '{"protocol":1,"x":"\\uDC00"}', "{}"]
    + [f'{{"protocol":{value}}}' for value in ("0", "-1", "true", '"1"', "1.0", "null", "9" * 5000)],
)
def test_malformed_documents_are_refused(text):
    with pytest.raises(CorruptDataError):
        decode(text.encode(), "/a")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_that_is_not_utf_8_is_refused(encoding):
    with pytest.raises(CorruptDataError):
        decode('{"protocol":1}'.encode(encoding), "/a")
    with pytest.raises(CorruptDataError):
        decode(b'{"protocol":1,"x":"\xed\xa0\x80"}', "/a")


def test_a_surrogate_pair_decodes_to_one_character():
    assert decode(encode({"x": "😀"}), "/a").text("x") == "😀"


def test_a_path_that_is_no_utf_8_is_spelt_out_in_what_is_written():
    document = {"path": "/j\udcff", "info": {"waiting": [{"\udcff": ("😀", "\udcff", 1)}]}}
    spelt_out = {"path": "/j\\udcff", "info": {"waiting": [{"\\udcff": ["😀", "\\udcff", 1]}]}}
    fields = decode(encode(seal(document)), "/a")
    check_seal(fields)
    assert fields.document.items() >= spelt_out.items()


def test_a_newer_protocol_is_refused_with_an_upgrade_hint():
    with pytest.raises(ProtocolTooNewError, match=f"written by protocol {PROTOCOL + 1}") as raised:
        decode(b'{"protocol":%d}' % (PROTOCOL + 1), "/job/x.json")
    assert raised.value.hint == upgrade_command()
    assert raised.value.path == "/job/x.json"


def test_unknown_fields_are_ignored():
    for kind in sorted(DOCUMENTS.keys() - {"marker", "manifest"}):
        document = {**json.loads(DOCUMENTS[kind][1]), "field of tomorrow": [1]}
        assert read_as(kind, json.dumps(document).encode()) == read_as(kind, DOCUMENTS[kind][1])


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none()))
def test_encoding_is_canonical_and_round_trips(document):
    document.pop("protocol", None)
    data = encode(document)
    assert data == encode(dict(reversed(document.items())))
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert decode(data, "/a").document == {"protocol": PROTOCOL, **document}


def test_nan_is_not_encoded():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"x": float("nan")})


@given(st.dictionaries(st.text(), st.integers() | st.text(), min_size=1), st.data())
def test_a_seal_detects_any_change(document, draw):
    document.pop("digest", None)
    document.pop("protocol", None)
    sealed = seal(document)
    assert check_seal(decode(encode(sealed), "/a")) == sealed["digest"]
    key = draw.draw(st.sampled_from(sorted(sealed)))
    changed = {**sealed, key: draw.draw(st.integers() | st.text())}
    if changed != sealed:
        with pytest.raises(CorruptDataError):
            check_seal(Fields(changed, "/a"))


def test_the_seal_of_a_too_deep_document_is_refused():
    with pytest.raises(CorruptDataError):
        check_seal(decode(DEEP.encode(), "/a"))


@pytest.mark.parametrize(
    ("getter", "good", "bad"),
    [
        (Fields.integer, [0, MAX_INTEGER], [-1, MAX_INTEGER + 1, True, 1.0, "1", None, [], 10**400]),
        (lambda fields, key: fields.integer(key, least=1), [1], [0]),
        (
            Fields.number,
            [0, -1.5, MAX_INTEGER],
            [float("nan"), float("inf"), True, "1", None, 10**400, 1e300],
        ),
        (Fields.text, ["", "x"], [None, 1, [], {}, b"x"]),
        (Fields.flag, [True, False], [0, 1, None, "true"]),
        (Fields.record, [{}], [None, [], "x"]),
        (Fields.optional_record, [{}, None], [[], 0, "", False]),
        (Fields.items, [[], [1]], [None, {}, "x", 0]),
        (Fields.records, [[], [{}]], [[1], [None], {}]),
        (Fields.integers, [[], [0, MAX_INTEGER]], [[-1], [True], [1.0], ["1"], 1, [MAX_INTEGER + 1]]),
    ],
)
def test_field_getters_accept_valid_and_refuse_invalid_values(getter, good, bad):
    for value in good:
        getter(Fields({"key": value}, "/a"), "key")
    for value in bad:
        with pytest.raises(CorruptDataError, match=r"field 'key' is not .*: /a"):
            getter(Fields({"key": value}, "/a"), "key")


def test_missing_fields_take_their_default_or_are_refused():
    fields = Fields({}, "/a")
    assert fields.text("key", "default") == "default"
    assert fields.flag("key") is False
    assert fields.flag("key", default=True) is True
    assert fields.optional_record("key") is None
    assert (fields.items("key"), fields.records("key"), fields.integers("key")) == ([], [], ())
    for getter in (fields.integer, fields.number, fields.text, fields.record):
        with pytest.raises(CorruptDataError):
            getter("key")


@dataclass(frozen=True)
class Inner:
    count: int = 0


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float | None
    inner: Inner = Inner(7)
    names: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


def test_a_record_is_read_by_the_types_and_defaults_of_its_class():
    whole = {"name": "n", "ratio": 0.5, "inner": {"count": 1}, "names": ["a"], "counts": {"b": 2}, "other": 3}
    assert record_from(Outer, Fields(whole, "/a")) == Outer("n", 0.5, Inner(1), ("a",), {"b": 2})
    assert record_from(Outer, Fields({"name": "n", "names": None}, "/a")) == Outer("n", None)
    assert record_from(Outer, Fields({}, "/a"), name="known") == Outer("known", None)
    assert record_in(Outer, {"key": whole}, "key", "inner") == record_from(Outer, Fields(whole, "/a"))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"name": 1},
        {"name": None},
        {"name": "n", "ratio": "x"},
        {"name": "n", "inner": {}},
        {"name": "n", "names": [1]},
        {"name": "n", "counts": {"a": -1}},
        {"name": "n", "inner": []},
    ],
)
def test_a_record_with_a_missing_or_wrong_field_is_refused(document):
    with pytest.raises(CorruptDataError):
        record_from(Outer, Fields(document, "/a"))
    assert record_in(Outer, {"key": document}, "key") is None


def test_a_field_with_a_default_may_be_required():
    with pytest.raises(CorruptDataError, match="'counts'"):
        record_from(Outer, Fields({"name": "n"}, "/a"), "counts")


def test_a_missing_document_raises_file_not_found_and_a_huge_one_corrupt():
    with pytest.raises(FileNotFoundError):
        read_document(MemoryDisk(), "/a")
    with pytest.raises(CorruptDataError):
        read_document(MemoryDisk({"/a": b" " * (17 << 20)}), "/a")
