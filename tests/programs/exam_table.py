"""Writes the table of the exam into a page, from what the tests of `make test-exam` have kept.

exam_table.py ROWS PAGE    # ROWS has a JSON object in each line; the table stands between two comments of PAGE
"""

import json
import re
import sys

HEAD = """\
| tiny random model | kinds of tensors | found and named, float32 | bfloat16 | unseen | least change |
|---|---|---|---|---|---|"""
_PLACE = re.compile(r"(<!-- table of the exam -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table(rows):
    """Return the table, a line for each model."""
    by_model = {}
    for row in rows:
        by_model.setdefault(row["model"], {})[row["dtype"]] = row
    return "\n".join([HEAD, *(_line(model, by_dtype) for model, by_dtype in by_model.items())])


def _line(model, by_dtype):
    exact, rounded = by_dtype["float32"], by_dtype["bfloat16"]
    unseen = ", ".join(sorted({*exact["unseen"], *rounded["unseen"]})) or "none"
    least = min(row["least"] for row in by_dtype.values())
    return f"| {model} | {exact['kinds']} | {exact['named']} | {rounded['named']} | {unseen} | {least:.2g} nats |"


def main(rows, page):
    with open(rows) as file:
        text = table(map(json.loads, file))
    with open(page) as file:
        before = file.read()
    after, count = _PLACE.subn(rf"\g<1>{text}\n", before)
    if count != 1:
        sys.exit(f"{page} has no place for the table")
    with open(page, "w") as file:
        file.write(after)


if __name__ == "__main__":
    main(*sys.argv[1:])
