"""Training throughput with packed rows against padded ones: verl's engine on CPU, one rank, float32.

    python benchmarks/packing.py [--rows 32] [--rounds 3] [--threads 2]

One engine of each kind trains on the same batches in turns, so that whatever else the machine does meets both.
Lengths of rows are drawn from a log-normal distribution (median 96 tokens, at most 512). The first step of each is
not counted.
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import torch
import transformers

from syncd.experience.model import Experience
from syncd.jobfile.model import JobFile
from trainer import get_trainer_wrapper
from trainer.engines.files import FileEngine
from trainer.experience.batch import Batch
from trainer.experience.cursor import Origin

SHAPE: Mapping[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
LONGEST = 512
MICRO: Mapping[str, Mapping[str, Any]] = {
    "8 rows": {"micro_batch_size": 8},
    "1024 tokens": {"options": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 1024}},
}
"""How rows are put into micro-batches, as the table `engine` has it."""


def main() -> None:
    """Measure each kind of micro-batch, and print one line for each."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows of a training step")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are counted")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as place:
        config = transformers.Qwen2Config(tie_word_embeddings=True, **SHAPE)
        of_config: Callable[..., transformers.PreTrainedModel] = transformers.AutoModelForCausalLM.from_config
        of_config(config, dtype=torch.float32).save_pretrained(f"{place}/model")
        for name, micro in MICRO.items():
            _measure(name, micro, Path(place), options)


def _measure(name: str, micro: Mapping[str, Any], place: Path, options: argparse.Namespace) -> None:
    engines = {way: _engine(place, name, micro, packing=way == "packed") for way in ("padded", "packed")}
    lengths = _lengths(options.rows)
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for number in range(options.rounds + 1):
        batch = _batch(lengths, number)
        for way in sorted(engines, reverse=bool(number % 2)):
            seconds[way].append(_timed(engines[way], batch))
    for engine in engines.values():
        engine.shutdown()
    rates = {way: [sum(lengths) / value for value in values[1:]] for way, values in seconds.items()}
    shown = ", ".join(f"{way} {report.spread(values, 0)}" for way, values in rates.items())
    ratio = statistics.median(rates["packed"]) / statistics.median(rates["padded"])
    print(f"micro-batches of {name}: {shown} tokens/s; packed {ratio:.2f} times as fast", flush=True)


def _timed(engine: FileEngine, batch: Batch) -> float:
    start = time.perf_counter()
    engine.train_step(batch)
    return time.perf_counter() - start


def _engine(place: Path, name: str, micro: Mapping[str, Any], *, packing: bool) -> FileEngine:
    job = place / f"job {name} {packing}"
    job.mkdir()
    document = {
        "job": {"dir": str(job)},
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "engine": {"device": "cpu", "compute_dtype": "float32", "packing": packing, **micro},
        "algorithm": {"old_logprobs": "rollout"},
        "trainer": {"total_steps": 100},
    }
    engine = get_trainer_wrapper(JobFile.model_validate(document))
    assert isinstance(engine, FileEngine)
    engine.prepare()
    return engine


def _lengths(rows: int) -> list[int]:
    draw = random.Random(1)
    return [max(16, min(LONGEST, round(draw.lognormvariate(4.56, 0.7)))) for _ in range(rows)]


def _batch(lengths: Sequence[int], number: int) -> Batch:
    found = [
        Experience(
            tokens=[(7 * row + 3 * place) % SHAPE["vocab_size"] for place in range(length)], prompt_length=8,
            logprobs=[-9.0] * (length - 8), action_mask=[True] * (length - 8),
            reward=float(row % 2), group=f"g{row // 8}", task="t", rollout=row, generation=1, step=number,
        )
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    origins = tuple(Origin("e", row, 0) for row in range(len(found)))
    numbers = tuple(row // 8 for row in range(len(found)))
    return Batch(tuple(found), numbers, (1.0,) * len(found), (0,) * len(found), origins, ())


if __name__ == "__main__":
    main()
