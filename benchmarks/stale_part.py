"""Counts versions until an engine is found that has stopped loading a part of the model, at three learning rates.

    python benchmarks/stale_part.py --json benchmarks/results/stale_part.json    # 1,000 versions at each rate
    python benchmarks/stale_part.py --versions 50 --engines 4

A small Qwen3 learns to predict the bytes of this repository's documentation, in bfloat16 with master weights in
float32, and publishes each step. Each engine has another attention than the trainer, and stops loading one kind of
tensor at a random version, or everything. It is judged as a follower judges it: by the tolerance, which was the only
rule before, and by the change since versions that it has proven. A right engine is followed beside them.
"""

import argparse
import copy
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
import transformers

from explorer_hooks.hook import ProbeAnswer
from explorer_hooks.parts.exam.model import kind_of
from explorer_hooks.proof.changes import START, Anchor, Anchors, stayed
from explorer_hooks.proof.judgement import compare, tolerance
from explorer_hooks.proof.log_probs import log_probs_of
from syncd.protocol.probe import Probe

RATES = (1e-5, 1e-4, 1e-3)
DTYPE = "bfloat16"

_ALL = "everything"
_SELDOM = 5
_ROWS, _LENGTH = 4, 16
_BATCH, _CONTEXT, _VOCABULARY = 4, 48, 256
_WARM_STEPS, _WARM_RATE = 200, 3e-3
_CONFIG: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

State = Mapping[str, torch.Tensor]
Tokens = tuple[tuple[int, ...], ...]


@dataclass
class Engine:
    """An engine that stops loading some tensors at a version."""

    part: str
    names: Sequence[str]
    since: int
    anchors: Anchors = field(default_factory=Anchors)
    kept: State = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)  # after how many versions, by rule

    def stop(self, running: State, anchors: Anchors) -> None:
        """Keep the tensors that it runs, and what it has proven like any other."""
        self.kept = {name: running[name] for name in self.names}
        self.anchors = copy.deepcopy(anchors)

    def judge(self, version: int, probe: Probe, answer: ProbeAnswer, calibrated: float) -> None:
        proof = compare(
            str(version), probe, answer, tolerance(probe, DTYPE, calibrated), calibrated, seconds=0.0
        )
        age = version - self.since + 1
        if not proof.is_proven:
            self.found.setdefault("tolerance", age)
        if "change" in self.found:
            return
        new = Anchor(str(version), probe, (answer,))
        if not proof.is_proven or stayed(self.anchors.changes(new)[0]):
            self.found["change"] = age
        else:
            self.anchors.add(new)

    def is_due(self, version: int) -> bool:
        """Return whether it is judged: seldom by the tolerance alone, which says it to within 5 versions."""
        return len(self.found) < 2 and ("change" not in self.found or version % _SELDOM == 0)


def main() -> None:
    """Train at each rate, and keep what was found."""
    options = _options()
    torch.manual_seed(0)
    text = _text()
    start = _warmed(text)
    rates = []
    for rate in RATES:
        rates.append(_followed(start, text, rate, options))
        _show(rates[-1])
    figures = {
        "what": "versions until an engine is found that stopped loading a part, bfloat16",
        "machine": report.machine(Path.cwd(), torch=torch.__version__),
        "versions": options.versions,
        "rates": rates,
    }
    if options.json:
        report.keep(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--versions", type=int, default=1000, help="at each learning rate")
    parser.add_argument(
        "--engines", type=int, default=10, help="engines that stop loading a part, at each learning rate"
    )
    parser.add_argument("--whole", type=int, default=10, help="engines that stop loading anything")
    parser.add_argument("--json", help="where the figures are kept")
    return parser.parse_args()


def _text() -> torch.Tensor:
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    return torch.frombuffer(
        bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8
    ).long()


def _model(attention: str) -> Any:
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_CONFIG))  # type: ignore[no-untyped-call]
    model.set_attn_implementation(attention)
    return model.eval()


def _batches(text: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    draw = random.Random(seed)
    while True:
        places = [draw.randrange(len(text) - _CONTEXT) for _ in range(_BATCH)]
        yield torch.stack([text[place : place + _CONTEXT] for place in places])


def _steps(model: Any, text: torch.Tensor, rate: float, seed: int) -> Iterator[State]:
    """Train for ever; yield the tensors of each step as they are published."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in _batches(text, seed):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield _published(model)


def _published(model: Any) -> State:
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def _warmed(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights that training starts from: a model that has learnt the most."""
    model = _model("eager")
    steps = _steps(model, text, _WARM_RATE, seed=1)
    for _ in range(_WARM_STEPS):
        next(steps)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _followed(
    start: Mapping[str, torch.Tensor], text: torch.Tensor, rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Train at one rate, with a right engine and others that stop, and return what was found of them."""
    model = _model("eager")
    model.load_state_dict(start)
    trainer, engine = _model("eager").to(torch.bfloat16), _model("sdpa").to(torch.bfloat16)
    tokens: Tokens = tuple(
        tuple(text[at * 1000 : at * 1000 + _LENGTH].tolist()) for at in range(1, _ROWS + 1)
    )
    good, engines = _engines(model, options)
    base = _published(model)
    probe, answer = _probe(trainer, base, tokens), _answer(engine, base, tokens)
    calibrated = compare(START, probe, answer, 1.0, None, seconds=0.0).mean
    good.anchors.add(Anchor(START, probe, (answer,)))
    alarms, before = {"tolerance": 0, "change": 0}, base
    for version, state in zip(
        range(1, options.versions + 1), _steps(model, text, rate, seed=2), strict=False
    ):
        probe = _probe(trainer, state, tokens)
        for one in engines:
            if version == one.since:
                one.stop(before, good.anchors)
            if version >= one.since and one.is_due(version):
                one.judge(version, probe, _answer(engine, {**state, **one.kept}, tokens), calibrated)
        _judge_good(good, version, probe, _answer(engine, state, tokens), calibrated, alarms)
        before = state
    return _figures(rate, calibrated, alarms, engines, options.versions)


def _judge_good(
    good: Engine, version: int, probe: Probe, answer: ProbeAnswer, calibrated: float, alarms: dict[str, int]
) -> None:
    good.found = {}
    good.judge(version, probe, answer, calibrated)
    for rule in good.found:
        alarms[rule] += 1


def _engines(model: Any, options: argparse.Namespace) -> tuple[Engine, list[Engine]]:
    """Return a right engine, and those that stop."""
    kinds: dict[str, list[str]] = {}
    for name in model.state_dict():
        kinds.setdefault(kind_of(name), []).append(name)
    kinds[_ALL] = list(model.state_dict())
    draw, last = random.Random(3), max(3, options.versions // 2)
    parts = [draw.choice(sorted(kinds)) for _ in range(options.engines)]
    stopped = [Engine(part, kinds[part], draw.randrange(2, last)) for part in parts]
    draw = random.Random(4)
    whole = [Engine(_ALL, kinds[_ALL], draw.randrange(2, last)) for _ in range(options.whole)]
    return Engine("", (), 1), [*stopped, *whole]


def _probe(model: Any, state: State, tokens: Tokens) -> Probe:
    model.load_state_dict(state)
    return Probe(tokens, _answer(model, state, tokens).logprobs, DTYPE, DTYPE)


def _answer(model: Any, state: State, tokens: Tokens) -> ProbeAnswer:
    model.load_state_dict(state)
    with torch.no_grad():
        return ProbeAnswer(log_probs_of(model, tokens))


def _figures(
    rate: float, calibrated: float, alarms: Mapping[str, int], engines: Sequence[Engine], versions: int
) -> dict[str, Any]:
    rows = [
        {"part": one.part, "since": one.since, "left": versions - one.since + 1, **one.found}
        for one in engines
    ]
    return {"rate": rate, "noise": calibrated, "false_alarms": dict(alarms), "engines": rows}


def _show(one: Mapping[str, Any]) -> None:
    alarms = json.dumps(one["false_alarms"])
    print(f"learning rate {one['rate']:g}, noise {one['noise']:.3g} nats, false alarms {alarms}")
    for is_whole in (False, True):
        engines = [engine for engine in one["engines"] if (engine["part"] == _ALL) is is_whole]
        for rule in ("change", "tolerance"):
            ages = sorted(engine[rule] for engine in engines if rule in engine)
            middle = f"median {statistics.median(ages):g}, most {max(ages)}" if ages else ""
            what = "everything" if is_whole else "a part"
            print(f"  {what}, by {rule}: {len(ages)} of {len(engines)} found {middle}", flush=True)


if __name__ == "__main__":
    main()
