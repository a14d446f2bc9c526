"""Deltas: the changed elements of weights. `encode`, `apply` and `fold` are for other trainers and explorers too.

    frame = encode(old, new)         # two tiles of at most 8 MiB, of bfloat16 words
    apply(copy_of_old, frame)        # in place; checked before and after
    both = fold(old, [frame, next])  # one frame for two

Needs numpy and pyarrow (the extra `delta`). Imports no torch.
"""

from syncd.transports.delta.ulp1 import EncodedFrame, apply, encode, fold

__all__ = ["EncodedFrame", "apply", "encode", "fold"]
