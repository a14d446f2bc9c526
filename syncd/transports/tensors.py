"""The one check that a version fits what is to be filled with it: names, shapes and dtypes. Pure functions.

What a version lacks, an engine still serves from the version before; what an engine does not know may end it. So
each tensor has to be there, and no other may be.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from syncd.errors import RefusedError


class TensorMeta(NamedTuple):
    """What a tensor is, without its elements.

    Args:
        dtype: As safetensors names it: F32, BF16, ...
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


Tensors = Mapping[str, TensorMeta]

Allows = Callable[[str, TensorMeta], bool]
"""Says of a tensor, by name and by what it is, whether it makes no difference."""

_NAMED = 3
"""How many differences a refusal names."""

_LONGEST = 80
"""Characters of a tensor's name that are printed at most."""


class Fit(NamedTuple):
    """How a version fits what is held.

    Args:
        wrong: Each way in which it does not, in words.
        unused: Names of the version that are other names of tensors that it has as well.
    """

    wrong: tuple[str, ...]
    unused: frozenset[str]


def _never(name: str, meta: TensorMeta) -> bool:
    del name, meta
    return False


def fit(
    held: Tensors,
    aliases: Mapping[str, str],
    offered: Tensors,
    *,
    cast: bool,
    may_lack: Allows = _never,
    may_add: Allows = _never,
) -> Fit:
    """Compare what a version holds with what is to be filled.

    Args:
        held: What is to be filled, each tensor under one name.
        aliases: Other names of those tensors.
        offered: What the version has.
        cast: Whether floating-point tensors may have another floating-point dtype.
        may_lack: Which of the held tensors the version may lack.
        may_add: Which tensors the version may have besides.
    """
    wrong = [
        f"tensor {_shown(name)} is missing"
        for name, meta in held.items()
        if not _offered(name, aliases, offered) and not may_lack(name, meta)
    ]
    for name, meta in offered.items():
        target = held.get(aliases.get(name, name))
        if target is None:
            wrong += [] if may_add(name, meta) else [f"tensor {_shown(name)} is not expected"]
        elif not _takes(target, meta, cast=cast):
            wrong.append(f"tensor {_shown(name)} is {_described(meta)} instead of {_described(target)}")
    unused = {
        name
        for name, first in aliases.items()
        if name in offered and _preferred(first, aliases, offered) != name
    }
    return Fit(tuple(wrong), frozenset(unused))


def common(held: Tensors, offered: Tensors) -> tuple[Tensors, Tensors]:
    """Return of both only the tensors that the other has too."""
    names = held.keys() & offered.keys()
    return {name: held[name] for name in names}, {name: offered[name] for name in names}


def require(found: Fit, what: str, *, path: str | None = None, hint: str | None = None) -> None:
    """Return if a version fits.

    Args:
        found: How it fits.
        what: The beginning of the refusal, such as "it does not fit the engine".
        path: The version's directory.
        hint: What to do about it.

    Raises:
        RefusedError: It does not; the message names the first differences.
    """
    if found.wrong:
        raise RefusedError(f"{what}: {first_of(found.wrong)}", path=path, hint=hint)


def first_of(wrong: Collection[str]) -> str:
    """Return the first few of several problems as one text that says how many more there are."""
    more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return "; ".join(list(wrong)[:_NAMED]) + more


def is_float(dtype: str) -> bool:
    """Say whether a dtype of safetensors is a floating-point one that torch casts."""
    return dtype in {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}


def _takes(target: TensorMeta, meta: TensorMeta, *, cast: bool) -> bool:
    if target.shape != meta.shape:
        return False
    return target.dtype == meta.dtype or (cast and is_float(target.dtype) and is_float(meta.dtype))


def _offered(name: str, aliases: Mapping[str, str], offered: Tensors) -> bool:
    return name in offered or any(alias in offered for alias, first in aliases.items() if first == name)


def _preferred(name: str, aliases: Mapping[str, str], offered: Tensors) -> str:
    """Return the name by which a tensor is taken from the version: its own, else the first other one."""
    if name in offered:
        return name
    return next(alias for alias, first in aliases.items() if first == name and alias in offered)


def _shown(name: str) -> str:
    return ascii(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...")


def _described(meta: TensorMeta) -> str:
    return f"{meta.dtype}{list(meta.shape)}"
