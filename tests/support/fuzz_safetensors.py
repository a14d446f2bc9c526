"""Feeds damaged and hostile headers to the parser and compares it with the safetensors library.

    PYTHONPATH=.:tests python -m support.fuzz_safetensors --seconds 20 --seed 7

Checked of every input: nothing but `CorruptDataError` is raised, within bounded time; what passes here
passes in the library too and means the same; what passes only there is one of the differences that the
parser's module names. Of some inputs the memory is measured too. Ends with 1 and the input in hexadecimal at
the first that fails.
"""

import argparse
import itertools
import json
import math
import os
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator

import safetensors

from syncd.errors import CorruptDataError
from syncd.protocol.safetensors import DTYPE_BITS, RECORD_LIMIT, Header, parse_header

SECONDS_LIMIT = 10.0
MEMORY_FACTOR = 16
MEMORY_BASE = 1 << 20
FIELDS = {"dtype", "shape", "data_offsets"}
ODD = [
    None, True, False, -1, -0.0, 0, 1, 1.0, 1e3, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, 10**400,
    "", "F32", "0", [], [0], [1, 2, 3], [[0]], [True], ["0"], [-1, 0], {}, {"U8": None}, {"dtype": "U8"},
]  # fmt: skip
TOKENS = [
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"\\ud800", b"\\ud83d\\ude00",
    b"\xed\xa0\x80", b"\xff", b"\xef\xbb\xbf", b"NaN", b"-", b"-0", b"Infinity", b"1e999", b"00", b"0.0",
    b"null", b"true", b"\0", b" ", b"\n", b"\t", b"__metadata__", b'"dtype":', b'"x":1,', b"//", b"\x1f",
    b"9" * 30, b"9" * 5000, b"[" * 3000, b'{"a":' * 3000,
]  # fmt: skip


class Finding(Exception):  # noqa: N818 - what a fuzzer finds
    """An input for which the parser does something wrong."""


class Pairs(list):
    """A JSON object as its (name, value) pairs, so that a name can be there twice."""


def dump(value) -> str:
    """Return the JSON text of a value that may hold `Pairs`."""
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{dump(item)}" for name, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def assemble(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def valid(random_: random.Random) -> tuple[Pairs, bytes]:
    """Return the header and the data of a file that nothing is wrong with."""
    header, position = Pairs(), 0
    for number in range(random_.randrange(6)):
        dtype = random_.choice(list(DTYPE_BITS))
        shape = [random_.choice((0, 1, 2, 3, 4, 8)) for _ in range(random_.randrange(4))]
        if math.prod(shape) * DTYPE_BITS[dtype] % 8:
            shape.append(8)
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        name = f"{random_.choice(('a', 'layers.0.w', 'Ü', '😀', '', '{', ':-'))}{number or ''}"
        fields = [("dtype", dtype), ("shape", shape), ("data_offsets", [position, end])]
        header.append((name, Pairs(random_.sample(fields, 3))))
        position = end
    if random_.random() < 0.5:
        header.append(("__metadata__", Pairs({"format": "pt", "é": "\n"}.items())))
    random_.shuffle(header)
    return header, random_.randbytes(position)


def bend(random_: random.Random, header: Pairs) -> None:
    """Change the structure of a header in one place."""
    place = random_.choice([header, *(value for _, value in header if isinstance(value, Pairs))])
    if not place:
        place.append((random_.choice(("a", "dtype", "__metadata__")), random_.choice(ODD)))
        return
    number = random_.randrange(len(place))
    name, value = place[number]
    choices: list[Callable[[], object]] = [
        lambda: place.pop(number),
        lambda: place.append((name, value)),
        lambda: place.insert(number, (random_.choice(("x", "dtype", "__metadata__")), random_.choice(ODD))),
        lambda: place.__setitem__(number, (name, random_.choice(ODD))),
        lambda: place.__setitem__(number, (random_.choice(("", "shape", "__metadata__", "\ud800")), value)),
        lambda: place.__setitem__(number, (name, bent(random_, value))),
    ]
    random_.choice([*choices, choices[-1], choices[-1]])()


def bent(random_: random.Random, value):
    """Return a value that is nearly another."""
    if isinstance(value, str):
        return random_.choice([*DTYPE_BITS, value.lower(), f"{value} ", "F128", ""])
    if type(value) is int:
        return value + random_.choice((-1, 1, 8, -8, 2**63, -(2**63)))
    if not isinstance(value, list) or isinstance(value, Pairs) or not value:
        return random_.choice(ODD)
    items = list(value)
    number = random_.randrange(len(items))
    items[number] = bent(random_, items[number]) if random_.random() < 0.7 else random_.choice(ODD)
    return random_.choice((items, items, items[::-1], [*items, 0], [*items, 1], items[1:]))


def damage(random_: random.Random, data: bytes) -> bytes:
    """Return bytes changed in one place."""
    at, until = sorted((random_.randrange(len(data) + 1), random_.randrange(len(data) + 1)))
    if random_.random() < 0.6:
        until = min(until, at + 1)
    middle = random_.choice(
        (
            b"",
            random_.choice(TOKENS),
            random_.randbytes(1),
            data[at:until] * 2,
            random_.choice(TOKENS) + data[at:until],
        )
    )
    return data[:at] + middle + data[until:]


def inputs(random_: random.Random) -> Iterator[bytes]:
    """Yield inputs for ever: whole files, files of bent structure, damaged headers, damaged files."""
    while True:
        header, data = valid(random_)
        text = dump(header).encode(errors="surrogatepass")
        yield assemble(text, data)
        yield assemble(text + b" " * random_.randrange(9), data)
        spaced = text.replace(b",", random_.choice((b" , ", b",\n"))).replace(
            b":", random_.choice((b": ", b" :\t"))
        )
        yield assemble(spaced, data)
        for _ in range(4):
            yield assemble(damage(random_, text), data)
        yield damage(random_, assemble(text, data))
        yield (
            struct.pack("<Q", random_.choice((0, 1, len(text) - 1, 10**8, 10**8 + 1, 2**63, 2**64 - 1)))
            + text
            + data
        )
        for _ in range(random_.randrange(1, 4)):
            bend(random_, header)
            yield assemble(dump(header).encode(errors="surrogatepass"), data)


def bombs() -> Iterator[bytes]:
    """Yield headers of some megabytes that ask for much more."""
    count = 1 << 20
    fill = b'"data_offsets":[0,0]'
    yield assemble(b'{"a":' + b"[" * count, b"")
    yield assemble(b'{"a":' * count, b"")
    yield assemble(b'{"a":{"shape":[' + b"[]," * count, b"")
    yield assemble(b'{"a":{"dtype":"U8","shape":[' + b"9" * count + b"]," + fill + b"}}", b"")
    yield assemble(b'{"a":{"dtype":"U8","shape":[' + b"0," * count + b"0]," + fill + b"}}", b"")
    yield assemble(b'{"a":{"dtype":"U8","shape":[' + b"0," * 2000 + b"0]," + fill + b"}}", b"")
    yield assemble(b'{"__metadata__":[' + b"{}," * count, b"")
    yield assemble(b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(count)) + b"}}", b"")
    yield assemble(b'{"' + b"\\n" * count + b'":1}', b"")
    yield assemble(b"{" + b" \n" * count, b"")
    yield assemble(b"{}" + b" " * count, b"")


def reference(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Return what the library finds in a file, None if it refuses it."""
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in found}


def documented(data: bytes) -> bool:
    """Say whether a file that the library accepts is one that the parser's module says it refuses."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
    header = json.loads(text, object_pairs_hook=Pairs)
    names = [name for name, _ in header]
    return text[0] != "{" or len(set(names)) < len(names) or any(itertools.starmap(_odd, header))


def _odd(name: str, value) -> bool:
    if not isinstance(value, Pairs):
        return True
    fields = dict(value)
    if name == "__metadata__":
        return len(fields) < len(value)
    if fields.keys() != FIELDS or len(fields) < len(value) or type(fields["dtype"]) is not str:
        return True
    return math.prod(filter(None, fields["shape"])) >= 1 << 56 or len(dump(value)) > RECORD_LIMIT


def parsed(data: bytes) -> Header | None:
    """Return the header, None if it is refused in the one way it may be."""
    started = time.process_time()
    try:
        header = parse_header(data, len(data), "/file")
    except CorruptDataError as error:
        header = None
        if not str(error).isprintable() or len(str(error)) > 2000:
            raise Finding(f"an unfit message: {error!r}") from None
    except Exception as error:
        raise Finding(f"raised {error!r}") from error
    if time.process_time() - started > SECONDS_LIMIT:
        raise Finding(f"took {time.process_time() - started:.1f} s of a processor")
    return header


def check(data: bytes) -> bool:
    """Check one input, and say whether the parser accepts it."""
    header, expected = parsed(data), reference(data)
    if header is None:
        if expected is not None and not documented(data):
            raise Finding("refused, and the library accepts it")
        return False
    if expected is None:
        raise Finding("accepted, and the library refuses it")
    begin = header.data_offset
    found = {
        name: (tensor.dtype, tensor.shape, data[begin + tensor.start : begin + tensor.end])
        for name, tensor in header.tensors.items()
    }
    if found != expected:
        raise Finding("the library reads something else")
    return True


def check_memory(data: bytes) -> None:
    """Check that an input costs no more memory than a multiple of its own size."""
    tracemalloc.start()
    try:
        parsed(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MEMORY_BASE + MEMORY_FACTOR * len(data):
        raise Finding(f"took {peak} bytes of memory for {len(data)}")


def fuzz(seed: int, *, seconds: float = math.inf, count: float = math.inf) -> tuple[int, int]:
    """Try inputs until time or number is up; return how many there were and how many were accepted."""
    tried = accepted = 0
    until = time.monotonic() + seconds
    for data in inputs(random.Random(seed)):
        if tried >= count or time.monotonic() >= until:
            break
        try:
            accepted += check(data)
            if tried % 500 == 0:
                check_memory(data)
        except Finding as finding:
            raise Finding(f"{finding}; input {tried} of seed {seed}: {data[:4000].hex()}") from finding
        tried += 1
    return tried, accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    try:
        for data in bombs():
            check_memory(data)
        tried, accepted = fuzz(options.seed, seconds=options.seconds)
    except Finding as finding:
        print(f"FAILED: {finding}")
        return 1
    print(f"{tried} inputs, {accepted} accepted, none wrong; seed {options.seed}, {options.seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
