"""Deltas: the changed elements of weights. `encode`, `apply` and `fold` are for other trainers and explorers too.

    frame = encode(old, new)         # two tiles of at most 8 MiB, of bfloat16 words
    apply(copy_of_old, frame)        # in place; checked before and after
    both = fold(old, [frame, next])  # one frame for two

They need numpy and pyarrow (the extra `delta`), and are imported when they are first used: the choice how a step is
stored needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncd.transports.delta.ulp1 import EncodedFrame, apply, encode, fold

__all__ = ["EncodedFrame", "apply", "encode", "fold"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from syncd.transports.delta import ulp1  # noqa: PLC0415 - imports numpy

    return getattr(ulp1, name)
