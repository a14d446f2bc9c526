"""The final answer of a mathematical response, and whether two answers are the same. Nothing is ever evaluated.

Bounded: texts beyond `MAX_ANSWER` characters and numbers beyond `MAX_DIGITS` digits are compared as text, and every
pattern here runs in time linear in its text.
"""

import re
from fractions import Fraction

MAX_RESPONSE = 1 << 18
"""Characters of a response that are looked at, from its end."""

MAX_ANSWER = 1000
MAX_DIGITS = 300

_BOXED = ("\\boxed{", "\\fbox{")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_RATIO = re.compile(r"([-+]?\d+)/([-+]?\d+)", re.ASCII)
_LATEX_RATIO = re.compile(r"([-+]?)\\[dt]?frac\{?([-+]?\d+)\}?\{?([-+]?\d+)\}?", re.ASCII)
_SHORT_RATIO = re.compile(r"([-+]?)\\[dt]?frac(\d)(\d)", re.ASCII)
_POWER = re.compile(r"([-+]?\d+(?:\.\d+)?)(?:\\times|\\cdot|\*)10\^\{?([-+]?\d{1,3})\}?", re.ASCII)
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,3})", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}")
_DROPPED = (
    *(("\\left", ""), ("\\right", ""), ("\\!", ""), ("\\,", ""), ("\\;", ""), ("\\ ", ""), ("\\$", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\%", "%"), ("{,}", ","), ("\u2212", "-"), ("$", "")),
    *(("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\(", ""), ("\\)", ""), ("\\[", ""), ("\\]", "")),
)


def final_answer(response: str) -> str | None:
    """Return the answer that a response gives last: what it boxes, else what follows ####, else its last number."""
    text = response[-MAX_RESPONSE:]
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if hashes := _HASHES.findall(text):
        return str(hashes[-1]).strip()
    numbers = _NUMBER.findall(text)
    return str(numbers[-1]).rstrip(",") if numbers else None


def same_answer(given: str, expected: str) -> bool:
    """Say whether two answers are the same: as numbers where both are one, else as normalised text."""
    left, right = normalised(given), normalised(expected)
    if left == right:
        return bool(left)
    return _same_number(left, right) or _same_parts(left, right)


def normalised(answer: str) -> str:
    """Return an answer without what does not change its meaning: spaces, dollars, units in text, LaTeX sizes."""
    text = answer[: MAX_ANSWER + 1].strip()
    for old, new in _DROPPED:
        text = text.replace(old, new)
    text = _TEXT.sub(r"\1", text)
    text = "".join(text.split()).rstrip(".")
    left, equals, right = text.rpartition("=")
    if equals and len(left) == 1 and left.isalpha():
        text = right
    return text.lower() if len(text) <= MAX_ANSWER else answer


def number(text: str) -> Fraction | None:
    """Return the number that a normalised answer is, exactly; None if it is none or too long to be looked at."""
    if len(text) > MAX_DIGITS:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    found = _ratio(text)
    return _power(text) if found is None else found


def _same_number(left: str, right: str) -> bool:
    """Say whether both are the same number; a percentage is as good as its number, and as its hundredth."""
    one, other = number(left.removesuffix("%")), number(right.removesuffix("%"))
    if one is None or other is None:
        return False
    percent = left.endswith("%") - right.endswith("%")
    return one == other or (percent != 0 and one == other * Fraction(100) ** percent)


def _ratio(text: str) -> Fraction | None:
    if match := _RATIO.fullmatch(text):
        sign, over, under = "", match[1], match[2]
    elif match := _SHORT_RATIO.fullmatch(text) or _LATEX_RATIO.fullmatch(text):
        sign, over, under = match[1], match[2], match[3]
    else:
        return None
    if int(under) == 0:
        return None
    return Fraction(int(over), int(under)) * (-1 if sign == "-" else 1)


def _power(text: str) -> Fraction | None:
    match = _POWER.fullmatch(text) or _SCIENTIFIC.fullmatch(text)
    return Fraction(match[1]) * Fraction(10) ** int(match[2]) if match else None


def _same_parts(left: str, right: str) -> bool:
    """Say whether two tuples or intervals have the same ends and the same parts."""
    if not (left and right and left[0] == right[0] and left[-1] == right[-1] and left[0] in "([{"):
        return False
    ours, theirs = left[1:-1].split(","), right[1:-1].split(",")
    same = (one == other or _same_number(one, other) for one, other in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) > 1 and all(same)


def _last_boxed(text: str) -> str | None:
    """Return what stands in the last box that is closed."""
    starts = [(text.rfind(mark), len(mark)) for mark in _BOXED]
    start, length = max(starts)
    if start < 0:
        return None
    depth = 1
    for at in range(start + length, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + length : at]
    return None
