"""What a probe costs the trainer at each sync, beside a training step and a sync: verl's engine on CPU, one rank.

    python benchmarks/probe.py [--model tiny|half-b ...] [--rounds 5] [--rows 8] [--length 256]

`half-b` has the shape of a Qwen2 model of 0.5 billion parameters, with random weights; it needs 12 GiB of memory.
Steps and syncs run in turn; the first of each is not counted.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from syncd.experience.model import Experience
from syncd.jobfile.model import JobFile
from trainer import get_trainer_wrapper
from trainer.engines.files import FileEngine
from trainer.experience.batch import Batch
from trainer.experience.cursor import Origin

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "half-b": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
}  # fmt: skip


def main() -> None:
    """Measure each model, and print one line for each."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="rows of a training step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    options = parser.parse_args()
    for name in options.model:
        with tempfile.TemporaryDirectory() as place:
            _measure(name, Path(place), options)


def _measure(name: str, place: Path, options: argparse.Namespace) -> None:
    config = transformers.Qwen2Config(tie_word_embeddings=True, **SHAPES[name])
    of_config: Callable[..., transformers.PreTrainedModel] = transformers.AutoModelForCausalLM.from_config
    of_config(config, dtype=torch.bfloat16).save_pretrained(place / "model")
    (place / "job").mkdir()
    engine = get_trainer_wrapper(_config(place))
    assert isinstance(engine, FileEngine)
    engine.prepare()
    batch = _batch(options.rows, options.length, config.vocab_size)
    seconds: dict[str, list[float]] = {"probe": [], "sync": [], "step": []}
    for _ in range(options.rounds + 1):
        seconds["step"].append(_timed(lambda: engine.train_step(batch)))
        seconds["sync"].append(_timed(lambda: _sync(engine)))
        seconds["probe"].append(engine.sync_metrics["timing_s/probe"])
    engine.shutdown()
    shown = (f"{kind} {_text(values[1:])}" for kind, values in seconds.items())
    size = sum(tensor.numel() for _, tensor in engine.export())
    print(f"{name} ({size / 1e6:.1f} M parameters): {', '.join(shown)}", flush=True)


def _sync(engine: FileEngine) -> None:
    engine.sync_weight("checkpoint")
    engine.wait_for_save()


def _text(values: list[float]) -> str:
    low, middle, high = (f"{1000 * of(values):.1f}" for of in (min, statistics.median, max))
    return f"{middle} ms ({low}-{high})"


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _config(place: Path) -> JobFile:
    document = {
        "job": {"dir": str(place / "job")},
        "model": {"path": str(place / "model")},
        "engine": {"device": "cpu", "compute_dtype": "float32", "micro_batch_size": 2},
        "trainer": {"total_steps": 100},
    }
    return JobFile.model_validate(document)


def _batch(rows: int, length: int, vocabulary: int) -> Batch:
    found = [
        Experience(
            tokens=[(7 * row + place) % vocabulary for place in range(length)], prompt_length=length // 4,
            logprobs=[-1.0] * (length - length // 4), action_mask=[True] * (length - length // 4),
            reward=float(row % 2), group="g", task="t", rollout=row, generation=1, step=0,
        )
        for row in range(rows)
    ]  # fmt: skip
    origins = tuple(Origin("e", row, 0) for row in range(rows))
    return Batch(tuple(found), (0,) * rows, (1.0,) * rows, (0,) * rows, origins, ())


if __name__ == "__main__":
    main()
