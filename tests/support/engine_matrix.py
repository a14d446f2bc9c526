"""The matrix of real engines: what a follower says of each load, beside what transformers says of the answers."""

import contextlib
import copy
from typing import NamedTuple

import pytest

from support import small_qwen
from support.engine_models import model_of
from support.followers import Scene
from support.probe_contract import CLOSE, FAR
from support.proven import probe_of
from support.publishing import publish_directory
from support.real_bed import told
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import write_base_probe

PROMPT = list(range(10, 110))
LONG = 300.0


BF16 = 0.5
"""The nats by which one of 8 tokens of a bfloat16 engine may be off: other weights are whole nats off."""


class Row(NamedTuple):
    """One engine of the matrix.

    Args:
        model: Its model, one of `engine_models.MODELS`.
        flags: Its flags besides the usual ones.
        env: Its environment besides the usual one.
        replicas: How many data-parallel replicas it has.
        reloads: Whether it answers rightly after it has read its start weights again.
        loads: Whether it answers rightly after it has loaded a version.
        may_fail: Whether this machine may be unable to start it.
        close: Nats by which a right answer's log-probs may differ from transformers' in float32.
    """

    model: str
    flags: tuple[str, ...] = ()
    env: dict[str, str] = {}  # noqa: RUF012 - never changed
    replicas: int = 1
    reloads: bool = True
    loads: bool = True
    may_fail: bool = False
    close: float = CLOSE

    @property
    def name(self):
        return " ".join((self.model, *self.flags))


@contextlib.contextmanager
def running(engine, row):
    """Start an engine and end it; skip the test with the reason if this machine cannot start it."""
    try:
        engine.start()
    except pytest.fail.Exception:
        if not row.may_fail:
            raise
        reasons = [line for line in engine.tail(20000).splitlines() if "Error: " in line]
        pytest.skip(f"{row.name} does not start here: {reasons[-1] if reasons else engine.tail(300)}")
    try:
        yield engine
    finally:
        engine.kill()


def vllm_answer(address, replica=None, model="policy"):
    """Return the tokens after the prompt and their log-probs, by an ordinary request to one replica."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    rank = {} if replica is None else {"X_data_parallel_rank": str(replica)}
    answer = told(address, "/v1/completions", {**body, "logprobs": 1, "return_token_ids": True}, **rank)
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def sglang_answer(address, replica=None, **more):
    """Return the tokens after the prompt and their log-probs, by an ordinary request to one replica.

    Args:
        more: What the request has besides.
    """
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    rank = {} if replica is None else {"routed_dp_rank": replica}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **rank, **more}
    found = told(address, "/generate", body)["meta_info"]["output_token_logprobs"]
    return [one[1] for one in found], [one[0] for one in found]


class Watched:
    """A real engine, and a follower of a real job over it.

    Args:
        place: An empty directory.
        hook: The engine's hook.
        base: The model that the engine was started with.
        answers: Returns tokens and log-probs of one of the engine's replicas.
        replicas: How many it has.
    """

    def __init__(self, place, hook, base, answers, replicas=1):
        self.place, self.hook, self.base, self._answers = place, hook, base, answers
        self._replicas = [None] if replicas == 1 else range(replicas)
        self.scene = Scene(place / "job")
        write_base_probe(self.scene.job, probe_of(base), "start")
        self.follower = self.scene.follow("e0", hook, retries=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.scene.close()

    def publish(self, step, model, directory=None):
        """Publish a model, or the adapter in a directory which makes the model what it is."""
        source = directory or str(self.place / f"export-{step}")
        if directory is None:
            model.save_pretrained(source)
        publish_directory(self.scene.job, step, source, probe=probe_of(model))
        self.scene.tick()

    def load(self, step, model, directory=None):
        """Publish a model and have it loaded; return the outcome."""
        self.publish(step, model, directory)
        return self.follower.turn(timeout=LONG)

    def report(self):
        return engine_report_of(self.scene.presence().info)

    def off(self, model):
        """Return how far the answers of the replica that is furthest off are from transformers, in nats."""
        return max(self._off(model, *self._answers(replica)) for replica in self._replicas)

    def _off(self, model, tokens, found):
        wanted = small_qwen.expected(model, [*PROMPT, *tokens], len(tokens))
        return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def check_adapters(watched, row, ask_for, record, heads=()):
    """Load adapters and compare the answers under each name with transformers'.

    Args:
        watched: An engine.
        row: The row.
        ask_for: Is told the name whose answers `watched` is to compare from then on.
        record: Takes a line about each adapter.
        heads: The layers of a third adapter besides those of the others.
    """
    assert "engine_calibrated" in watched.scene.names()
    assert watched.off(watched.base) < row.close
    for step in (1, 2, 3) if heads else (1, 2):
        layers = [*small_qwen.ADAPTED, *(heads if step == 3 else ())]
        adapter, base = str(watched.place / f"adapter-{step}"), copy.deepcopy(watched.base)
        small_qwen.write_adapter(adapter, step, model=base, layers=layers)
        model = small_qwen.model_with_adapter(step, base, layers)
        outcome = watched.load(step, model, adapter)
        assert outcome.kind == "applied", outcome
        ask_for(f"policy-{watched.scene.label(step)}")
        off, found = watched.off(model), watched.report()
        record(f"{row.name}: adapter {step}: {found.state}, {found.proof}, answers {off:.1e} off")
        assert off < row.close
        assert found.state is EngineState.PROVEN
        assert found.proof.checksums == "not needed"


def check_row(watched, row, record):
    """Compare what the follower says with transformers, of the start weights and of two versions."""
    right = watched.off(model_of(row.model, 0)) < row.close
    state, proof = watched.report().state, watched.report().proof
    record(f"{row.name}: start weights read again: {state}, mean {proof.mean:.1e}")
    assert "engine_calibrated" in watched.scene.names()
    assert (right, "reload_tested" in watched.scene.names()) == (row.reloads, row.reloads)
    assert (state is EngineState.WRONG) is not row.reloads
    for step in (1, 2):
        model = model_of(row.model, step)
        outcome = watched.load(step, model)
        off, found = watched.off(model), watched.report()
        record(f"{row.name}: version {step}: {found.state}, {found.proof}, ordinary answers {off:.1e} off")
        assert (off < row.close) is row.loads
        assert (off > max(FAR, row.close)) is not row.loads
        assert found.state is (EngineState.PROVEN if row.loads else EngineState.WRONG)
        assert outcome.kind == ("applied" if row.loads else "failed")
        assert found.proof.replicas == row.replicas


def check_neighbours(watched, row, record, *, finds):
    """Load versions that no probe tells from the one before, the last by an engine that stays where it was.

    Args:
        finds: Whether the engine's checksums show that it did.
    """
    model = model_of(row.model, 2)
    nudge(model, "model.embed_tokens.weight")
    assert watched.load(3, model).kind == "applied"
    assert watched.report().proof.checksums == "changed"
    watched.hook._reload = lambda directory, label: watched.hook.mark(label)
    nudge(model, "model.layers.0.self_attn.o_proj.weight")
    outcome, found = watched.load(4, model), watched.report()
    record(f"{row.name}: no load of a neighbour: {found.state}, {outcome.reason or found.proof.checksums}")
    if finds:
        assert outcome.kind == "failed"
        assert "o_proj" in outcome.reason
        assert "checksums" in outcome.reason
    else:
        assert (found.state, found.proof.checksums) == (EngineState.PROVEN, "hidden")


def nudge(model, name):
    """Change a tensor of a model by so little that its answers stay within 1e-5 nats."""
    import torch

    with torch.no_grad():
        model.get_parameter(name)[3] += 1e-7
