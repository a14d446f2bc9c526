"""When the next step must be a keyframe, a step stored whole: pure rules, for everything that writes deltas."""

from syncd.transports.files.storage import ChainLength

KEYFRAME_EVERY = 32  # the most deltas after a keyframe unless a limit is given; the next step is whole
LARGEST_SHARE = 1 / 4  # the share of a whole step above which a step is whole

LARGEST_CHAIN = 1 / 2
"""The share of a whole step that the deltas after a keyframe may have together before the next step is whole."""


def chain_problem(chain: ChainLength, whole: int, every: int = KEYFRAME_EVERY, limit: int = 0) -> str:
    """Return why a chain is too long for another delta, empty where it is not.

    Args:
        whole: Bytes of a whole step.
        every: The most deltas after a keyframe.
        limit: The most bytes of them together; 0 for `LARGEST_CHAIN` of a whole step.
    """
    if chain.deltas >= every:
        return f"{chain.deltas} deltas follow step {chain.keyframe} already"
    if limit and chain.size > limit:
        return f"the deltas since step {chain.keyframe} have more than {limit} bytes"
    if not limit and chain.size > LARGEST_CHAIN * whole:
        return f"the deltas since step {chain.keyframe} have {LARGEST_CHAIN:.0%} of its size"
    return ""


def is_too_large(size: int, whole: int) -> bool:
    return size > LARGEST_SHARE * whole
