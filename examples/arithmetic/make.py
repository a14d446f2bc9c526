"""Writes the model to start from, the demonstrations, and the tasks of explorers.

    python examples/arithmetic/make.py DIR --seed 1

makes DIR/model (config, weights, tokenizer), DIR/sft.jsonl, DIR/tasks.jsonl and DIR/held-out.jsonl.
"""

import argparse
from pathlib import Path

from problems import make_sft_data, make_tasks
from tiny_model import make_model
from transformers.utils import logging


def main() -> None:
    """Write the model, the demonstrations and the tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument("--examples", type=int, default=20000)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    options = parser.parse_args()
    logging.disable_progress_bar()
    options.directory.mkdir(parents=True, exist_ok=True)
    parameters = make_model(options.directory / "model", options.seed, tied=options.tied)
    make_sft_data(options.directory / "sft.jsonl", options.seed, options.examples)
    make_tasks(options.directory / "tasks.jsonl", "train")
    make_tasks(options.directory / "held-out.jsonl", "test")
    print(f"{options.directory}: a model of {parameters} parameters, {options.examples} demonstrations")


if __name__ == "__main__":
    main()
