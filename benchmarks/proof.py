"""Measures what the proof of a version costs its load: from the marker to an engine that runs the version.

    python benchmarks/proof.py                                   # a transformers model in this process, 0.9 GiB
    python benchmarks/proof.py --model tiny --rounds 3
    python benchmarks/proof.py --write DIR                       # a model for a server, which is then started on it
    python benchmarks/proof.py --start DIR --hook vllm=http://127.0.0.1:8000 --pid PID --json FILE

Versions go through `syncd publish`, a daemon and a follower, as they do in a job. Two models that differ by less than
the noise take turns, twice with a probe and twice without. The second of each two counts, and whatever else the
machine does meets both. The engine is examined first, so it is asked for the tokens of the probe alone.

Checksums that take more than 50 ms are asked at most a twentieth of the time. Here they are asked before and after a
load, because the version before it had none: their time is a row of its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
import transformers
from probe import SHAPES
from report import Row
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from explorer_hooks.finding import open_hook
from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hook import Checksums, ProbingHook
from explorer_hooks.hooks.transformers import TransformersHook
from explorer_hooks.http_client import HttpClient

TARGET = 20.0
"""Percent of a load that its proof may take."""

EXAM_LOADS = 3.0
"""The most loads that an exam may take."""

_LONG = 900.0
_SYNCD = [sys.executable, "-m", "syncd"]
_WAITED = "noticed"
"""The part of a version's timings that is no part of its load."""

_CYCLE = (True, True, False, False)
"""Whether each version has a probe."""

_NEAR = 1.01
"""By how much the last norm of the two models differs."""


class Load(NamedTuple):
    """What one version took, in seconds."""

    has_proof: bool
    wall: float
    proof: float
    checksums: float  # of the proof's time
    client: float  # processor time of this process
    server: float  # and of the server with its children

    @property
    def processor(self) -> float:
        return self.client + self.server


class Forward(NamedTuple):
    """What a forward pass over the probe's tokens took, in seconds."""

    wall: float
    processor: float


class Session:
    """One engine, and the versions that it is given.

    Args:
        starts: The directories of the two models; the engine was started on the first.
    """

    def __init__(self, scratch: Path, starts: Sequence[Path], options: argparse.Namespace) -> None:
        self._job, self._options = scratch / "job", options
        self._job.mkdir()
        self._models = [
            (start, self._probe(start, scratch / f"{at}.json")) for at, start in enumerate(starts)
        ]
        self.hook = _hook(starts[0], options)
        self._checksums, self._summed = self.hook.checksums, 0.0
        vars(self.hook)["checksums"] = self._timed_checksums
        self.exam: Mapping[str, Any] = {}
        self.loads: list[Load] = []

    def _probe(self, start: Path, path: Path) -> Path:
        with open(path, "wb") as file:
            subprocess.run(
                [*_SYNCD, "probe", str(start), "--dtype", self._options.dtype], stdout=file, check=True
            )
        return path

    def _timed_checksums(self) -> Checksums | None:
        begun = time.perf_counter()
        try:
            return self._checksums()
        finally:
            self._summed += time.perf_counter() - begun

    def measure(self) -> None:
        """Load versions; of each two of a kind the second counts."""
        settings = FollowOptions(stay=True, reload_test=False, exam=self._options.exam)
        listener = partial(_keep_exam, self)
        with (
            report.running_daemon(self._job, *report.KEEP_NEWEST),
            Follower.open(self._job, self.hook, "e0", settings, listener=listener) as follower,
        ):
            for step in range(1, len(_CYCLE) * (self._options.rounds + 1) + 1):
                load = self._load(follower, step)
                if step > len(_CYCLE) and step % 2 == 0:
                    self.loads.append(load)

    def _load(self, follower: Follower, step: int) -> Load:
        has_proof = _CYCLE[(step - 1) % len(_CYCLE)]
        start, probe = self._models[step % 2]
        proof = ["--probe", str(probe)] if has_proof else []
        command = [*_SYNCD, "publish", str(self._job), str(step), str(start), *proof]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        client, server, self._summed = time.process_time(), _used(self._options.pid), 0.0
        outcome = follower.turn(_LONG)
        client, server = time.process_time() - client, _used(self._options.pid) - server
        assert outcome.kind == "applied", outcome.reason
        assert ("prove" in outcome.timings) is has_proof, "the engine answers no probes"
        wall = sum(spent for part, spent in outcome.timings.items() if part != _WAITED)
        return Load(has_proof, wall, outcome.timings.get("prove", 0.0), self._summed, client, server)


def main() -> None:
    """Load versions, and print what their proofs take."""
    warnings.filterwarnings("ignore")
    options = _options()
    if options.write:
        _write(Path(options.write), options)
        return
    with report.scratch_directory("syncd-proof-", options.dir) as scratch:
        start = Path(options.start or scratch / "model")
        if not options.start:
            _write(start, options)
        session = Session(scratch, (start, _moved(start, scratch / "near")), options)
        session.measure()
        figures = _figures(session, start, scratch, options)
    _show(figures)
    if options.json:
        report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", choices=SHAPES, default="half-b", help="the shape of the model that is made"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cpu", help="of the model in this process")
    parser.add_argument("--write", help="write the model into this directory, and measure nothing")
    parser.add_argument("--start", help="a model directory, in the place of one that is made")
    parser.add_argument("--hook", help="NAME=ADDRESS of a server that was started on --start")
    parser.add_argument(
        "--pid", type=int, default=0, help="the server's process, whose processor time counts"
    )
    parser.add_argument("--exam", choices=["on", "off"], default="on", help="whether the engine is examined")
    parser.add_argument("--rounds", type=int, default=5, help="versions of each kind that count")
    parser.add_argument("--dir", default=None, help="where to work; files go through its file system")
    parser.add_argument("--json", help="where the figures are kept")
    options = parser.parse_args()
    if options.hook and not options.start:
        parser.error("--hook needs --start, the directory that the server was started on")
    return options


def _write(place: Path, options: argparse.Namespace) -> None:
    """Write a model with random weights, and a tokenizer, without which no server starts."""
    shape = dict(SHAPES[options.model])
    config = transformers.Qwen2Config(**shape)
    dtype: torch.dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    transformers.PreTrainedModel.save_pretrained(model, place)  # type: ignore[arg-type]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: shape["vocab_size"]]
    further = [f"<{at}>" for at in range(len(alphabet), shape["vocab_size"])]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate([*alphabet, *further])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(place / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": alphabet[0]}
    (place / "tokenizer_config.json").write_text(json.dumps(about))


def _moved(start: Path, place: Path) -> Path:
    """Write a neighbor of a model."""
    shutil.copytree(start, place)
    for path in place.glob("*.safetensors"):
        tensors = load_file(path)
        for name in {"model.norm.weight"} & set(tensors):
            tensors[name] *= _NEAR
        save_file(tensors, path, {"format": "pt"})
    return place


def _keep_exam(session: Session, level: str, name: str, fields: Mapping[str, Any]) -> None:
    """Keep what an exam took, or why there was none."""
    del level
    if name in ("engine_examined", "exam_left_out"):
        session.exam = dict(fields)


def _used(pid: int) -> float:
    """Return the processor seconds that a process and its children have used; 0 without one."""
    if not pid:
        return 0.0
    path = Path(f"/proc/{pid}")
    fields = (path / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    children = [child for task in path.glob("task/*/children") for child in task.read_text().split()]
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_used(int(child)) for child in children)


def _forward(hook: ProbingHook, probe: Path, options: argparse.Namespace) -> list[Forward]:
    """Return what the model's forward pass over the probe's tokens takes: no proof can take less."""
    tokens = json.loads(probe.read_bytes())["tokens"]
    if isinstance(hook, TransformersHook):
        run = partial(_run_model, hook.model, tokens)
    elif options.hook.startswith("vllm="):
        address = options.hook.partition("=")[2]
        run = partial(
            _run_server, HttpClient(address, token=None, timeout=_LONG, ask_timeout=_LONG, missing=""), tokens
        )
    else:
        return []
    found: list[Forward] = []
    for _ in range(options.rounds + 1):
        start, used = time.perf_counter(), time.process_time() + _used(options.pid)
        run()
        used = time.process_time() + _used(options.pid) - used
        found.append(Forward(time.perf_counter() - start, used))
    return found[1:]


def _run_model(model: torch.nn.Module, tokens: Sequence[Sequence[int]]) -> None:
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
    with torch.no_grad():
        float(model(rows.to(next(model.parameters()).device)).logits[0, 0, 0])


def _run_server(server: HttpClient, tokens: Sequence[Sequence[int]]) -> None:
    """Ask for one token after each row, without log-probs and with nothing in the prefix cache."""
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "cache_salt": uuid.uuid4().hex}
    server.post("/v1/completions", body, hint="see the log of the vLLM server")


def _hook(start: Path, options: argparse.Namespace) -> ProbingHook:
    if options.hook:
        hook = open_hook(options.hook, timeout=_LONG)
        assert isinstance(hook, ProbingHook)
        return hook
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=dtype)
    return TransformersHook(model.to(options.device).eval())


def _figures(session: Session, start: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    proven, loaded = ([one for one in session.loads if one.has_proof is kind] for kind in (True, False))
    exam = dict(session.exam)
    if "seconds" in exam:
        load = sum(one.wall for one in loaded) / len(loaded)
        # Afterwards the start weights are loaded.
        exam |= {"seconds": exam["seconds"] + load, "loads": 1 + exam["seconds"] / load}
    return {
        "engine": options.hook.partition("=")[0] if options.hook else "transformers in this process",
        "machine": report.machine(
            scratch, torch=torch.__version__, device=options.device, load=round(os.getloadavg()[0], 1)
        ),
        "bytes": sum(file.stat().st_size for file in start.glob("*.safetensors")),
        "dtype": options.dtype,
        "with_proof": [one._asdict() for one in proven],
        "without_proof": [one._asdict() for one in loaded],
        "forward": [one._asdict() for one in _forward(session.hook, scratch / "0.json", options)],
        "share_percent": {
            "wall": 100 * sum(one.proof for one in proven) / sum(one.wall for one in proven),
            "wall, without checksums": 100
            * sum(one.proof - one.checksums for one in proven)
            / sum(one.wall - one.checksums for one in proven),
            "wall, in turns": _more([one.wall for one in proven], [one.wall for one in loaded]),
            "processor, in turns": _more(
                [one.processor for one in proven], [one.processor for one in loaded]
            ),
        },
        "exam": exam,
    }


def _more(values: Sequence[float], others: Sequence[float]) -> float:
    """Return by how much values are above others, in percent of the values."""
    return 100 * (1 - sum(others) / len(others) * len(values) / sum(values))


def _show(figures: Mapping[str, Any]) -> None:
    print(f"{figures['bytes'] / 2**30:.2f} GiB, {figures['engine']}, {figures['machine']}")
    report.print_targets([*_rows(figures), *_exam_rows(figures["exam"])], 42, 32)


def _rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    proven, loaded = figures["with_proof"], figures["without_proof"]
    yield "load with its proof, s", report.spread([one["wall"] for one in proven], 3), "", None
    yield "load without, s", report.spread([one["wall"] for one in loaded], 3), "", None
    for what in ("client", "server"):
        yield f"CPU of the {what} with, s", report.spread([one[what] for one in proven], 3), "", None
        yield f"CPU of the {what} without, s", report.spread([one[what] for one in loaded], 3), "", None
    yield "proof, ms", report.spread([1000 * one["proof"] for one in proven], 1), "", None
    yield "  of it checksums, ms", report.spread([1000 * one["checksums"] for one in proven], 1), "", None
    for how, share in figures["share_percent"].items():
        yield f"proof, % of the load, {how}", f"{share:.1f}", f"<= {TARGET:g}", share <= TARGET
    for how in ("wall", "processor") if figures["forward"] else ():
        passes = [one[how] for one in figures["forward"]]
        yield f"forward pass over its tokens, {how}, s", report.spread(passes, 3), "", None
        one_pass = sum(passes) / len(passes)
        share = 100 * one_pass / (one_pass + _mean(loaded, how))
        yield f"  bound: a pass, % of a load with it, {how}", f"{share:.1f}", "", None


def _mean(loads: Sequence[Mapping[str, float]], how: str) -> float:
    """Return the mean wall or processor time of loads."""
    parts = ("wall",) if how == "wall" else ("client", "server")
    return sum(one[part] for one in loads for part in parts) / len(loads)


def _exam_rows(exam: Mapping[str, Any]) -> Iterator[Row]:
    if "seconds" not in exam:
        yield "exam", str(exam.get("reason", "none")), "", None
        return
    yield "exam, s", f"{exam['seconds']:.3f}", "", None
    yield "exam, loads", f"{exam['loads']:.1f}", f"<= {EXAM_LOADS:g}", exam["loads"] <= EXAM_LOADS
    yield "making it, s", f"{exam['made']:.1f}", "", None
    yield "its copy, GiB", f"{exam['bytes'] / 2**30:.2f}", "", None


if __name__ == "__main__":
    main()
