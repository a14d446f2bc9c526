"""Writes the model to start from, the demonstrations of a careless teacher, and the tasks of explorers.

    python examples/calculator/make.py DIR --seed 1

makes DIR/model (config, weights, tokenizer with a chat template), DIR/sft.jsonl, DIR/tasks.jsonl and
DIR/held-out.jsonl.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

from calculator_model import make_model
from calculator_tasks import write_demonstrations, write_tasks
from transformers.utils import logging

READ = 500
"""Demonstrations that decide which tokens there are."""


def main() -> None:
    """Write the model, the demonstrations and the tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of weights, demonstrations and tasks")
    parser.add_argument("--conversations", type=int, default=12000)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=200, help="tasks of the evaluation")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    options = parser.parse_args()
    logging.disable_progress_bar()
    place = options.directory
    place.mkdir(parents=True, exist_ok=True)
    write_demonstrations(place / "sft.jsonl", options.seed, options.conversations)
    write_tasks(place / "tasks.jsonl", options.seed, options.tasks, "train")
    write_tasks(place / "held-out.jsonl", options.seed, options.held_out, "test")
    with open(place / "sft.jsonl", encoding="ascii") as file:
        read = [json.loads(line)["messages"] for line in islice(file, READ)]
    parameters = make_model(place / "model", options.seed, read, tied=options.tied)
    print(f"{place}: a model of {parameters} parameters, {options.conversations} conversations")


if __name__ == "__main__":
    main()
