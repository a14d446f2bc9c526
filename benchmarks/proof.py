"""Measures the share of a load that its proof takes: a version, from its marker to an engine that has proven it.

    python benchmarks/proof.py                                   # a transformers model in this process, 0.9 GiB
    python benchmarks/proof.py --model tiny --rounds 3
    python benchmarks/proof.py --start DIR --hook vllm=http://127.0.0.1:8000   # a server that was started on DIR

Versions go through `syncd publish`, a daemon and a follower, as they do in a job; every one has the same weights. The
engine is examined first, so it is asked for the tokens of the probe alone.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
import transformers
from probe import SHAPES
from report import Row

from explorer_hooks.finding import open_hook
from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hook import Hook
from explorer_hooks.hooks.transformers import TransformersHook

TARGET = 20.0
"""Percent of a load that its proof may take."""

EXAM_LOADS = 3.0
"""The most loads that an exam may take."""

_LONG = 900.0
_SYNCD = [sys.executable, "-m", "syncd"]
_WAITED = "noticed"
"""The part of a version's timings that is no part of its load."""


def main() -> None:
    """Load versions, and print what their proofs take."""
    warnings.filterwarnings("ignore")
    options = _options()
    with report.scratch_directory("syncd-proof-", options.dir) as scratch:
        start = Path(options.start) if options.start else _made(scratch / "model", options)
        rounds = _measure(scratch, start, options)
        machine = report.machine(scratch, torch=torch.__version__, device=options.device)
    size = sum(file.stat().st_size for file in start.glob("*.safetensors")) if options.start else options.size
    print(f"{size / 2**30:.2f} GiB, {options.hook or 'transformers in this process'}, {machine}")
    report.print_targets([*_rows(rounds, options.forward), *_exam_rows(rounds, options.examined)], 36, 32)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", choices=SHAPES, default="half-b", help="the shape of the model that is made"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cpu", help="of the model in this process")
    parser.add_argument("--start", help="a model directory, in the place of one that is made")
    parser.add_argument("--hook", help="NAME=ADDRESS of a server that was started on --start")
    parser.add_argument("--exam", choices=["on", "off"], default="on", help="whether the engine is examined")
    parser.add_argument("--rounds", type=int, default=5, help="versions that count, after one that does not")
    parser.add_argument("--dir", default=None, help="where to work; files go through its file system")
    options = parser.parse_args()
    options.examined = {}
    if bool(options.hook) > bool(options.start):
        parser.error("--hook needs --start, the directory that the server was started on")
    return options


def _made(place: Path, options: argparse.Namespace) -> Path:
    config = transformers.Qwen2Config(**dict(SHAPES[options.model]))
    dtype: torch.dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    transformers.PreTrainedModel.save_pretrained(model, place)  # type: ignore[arg-type]
    options.size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    return place


def _measure(scratch: Path, start: Path, options: argparse.Namespace) -> list[Mapping[str, float]]:
    """Return the timings of each version that counts."""
    (job := scratch / "job").mkdir()
    probe = scratch / "probe.json"
    with open(probe, "wb") as file:
        subprocess.run([*_SYNCD, "probe", str(start), "--dtype", options.dtype], stdout=file, check=True)
    rounds, hook = [], _hook(start, options)
    settings = FollowOptions(stay=True, reload_test=False, exam=options.exam)
    listener = partial(_keep_exam, options)
    with report.running_daemon(job), Follower.open(job, hook, "e0", settings, listener=listener) as follower:
        for step in range(1, options.rounds + 2):
            publish = [*_SYNCD, "publish", str(job), str(step), str(start), "--probe", str(probe)]
            subprocess.run(publish, stdout=subprocess.DEVNULL, check=True)
            outcome = follower.turn(_LONG)
            assert outcome.kind == "applied", outcome.reason
            assert "prove" in outcome.timings, "the engine answers no probes"
            rounds.append(outcome.timings)
    options.forward = _forward(hook, probe, options.rounds)
    return rounds[1:]


def _keep_exam(options: argparse.Namespace, level: str, name: str, fields: Mapping[str, Any]) -> None:
    """Keep what an exam took, or why there was none."""
    del level
    if name in ("engine_examined", "exam_left_out"):
        options.examined = dict(fields)


def _forward(hook: Hook, probe: Path, rounds: int) -> list[float]:
    """Return the seconds of the model's forward pass over the probe's tokens: no proof can take less."""
    found: list[float] = []
    if not isinstance(hook, TransformersHook):
        return found
    rows = torch.tensor(json.loads(probe.read_bytes())["tokens"], device=next(hook.model.parameters()).device)
    for _ in range(rounds):
        start = time.perf_counter()
        with torch.no_grad():
            float(hook.model(rows).logits[0, 0, 0])
        found.append(time.perf_counter() - start)
    return found


def _hook(start: Path, options: argparse.Namespace) -> Hook:
    if options.hook:
        return open_hook(options.hook, timeout=_LONG)
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=dtype)
    return TransformersHook(model.to(options.device).eval())


def _rows(rounds: list[Mapping[str, float]], forward: list[float]) -> Iterator[Row]:
    loads = [sum(spent for part, spent in one.items() if part != _WAITED) for one in rounds]
    shares = [100 * one["prove"] / load for one, load in zip(rounds, loads, strict=True)]
    yield "load with its proof, s", report.spread(loads, 3), "", None
    yield "proof, ms", report.spread([1000 * one["prove"] for one in rounds], 1), "", None
    if forward:
        yield "forward pass over its tokens, ms", report.spread([1000 * one for one in forward], 1), "", None
    middle = sorted(shares)[len(shares) // 2]
    yield "proof, % of the load", report.spread(shares, 1), f"<= {TARGET:g}", middle <= TARGET


def _exam_rows(rounds: list[Mapping[str, float]], exam: Mapping[str, Any]) -> Iterator[Row]:
    if "seconds" not in exam:
        yield "exam", str(exam.get("reason", "none")), "", None
        return
    load = sorted(one["load"] for one in rounds)[len(rounds) // 2]
    loads = (exam["seconds"] + load) / load  # afterwards the start weights are loaded
    yield "exam, s", f"{exam['seconds'] + load:.3f}", "", None
    yield "exam, loads", f"{loads:.1f}", f"<= {EXAM_LOADS:g}", loads <= EXAM_LOADS
    yield "making it, s", f"{exam['made']:.1f}", "", None
    yield "its copy, GiB", f"{exam['bytes'] / 2**30:.2f}", "", None


if __name__ == "__main__":
    main()
