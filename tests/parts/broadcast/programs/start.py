"""What a job with ready explorers begins from.

start.py DIRECTORY      writes DIRECTORY/model and DIRECTORY/tasks.jsonl
"""

import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[4] / "examples" / "arithmetic"
sys.path.insert(0, str(EXAMPLES))

from problems import problems  # noqa: E402
from tiny_model import make_model  # noqa: E402


def main(directory):
    make_model(f"{directory}/model", 1)
    rows = [{"prompt": one.prompt, "answer": one.answer} for one in problems("train")]
    Path(f"{directory}/tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
