"""Generation: log-probs are those of the model, and each group says truthfully which versions made it."""

import asyncio
import copy
import dataclasses
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.fake_servers import Answer, VanishError
from support.generating import Completing
from support.job_file import job_of, write_job

from explorer_hooks.hook import Running
from explorer_hooks.hooks.transformers import TransformersHook
from explorer_hooks.http_client import HttpClient
from explorer_hooks.run import served
from explorer_hooks.run.generation import (
    BEFORE_THE_FIRST,
    GeneratorContext,
    GroupRequest,
    version_after,
    version_of,
)
from explorer_hooks.run.load import load_file
from explorer_hooks.run.local import LocalGenerator, SequenceLimits, draw, open_hook, sequence_limits
from explorer_hooks.run.served import ServerGenerator, served_model
from explorer_hooks.run.server_apis import ApiChoice
from explorer_hooks.run.tokens import PlainTokens, _plain, open_tokens
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "arithmetic"))

from tiny_model import make_model

CONTENT = "0f1e2d3c4b5a6978"
"""What a label says of the content of a version."""

LONG = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, 3)
    return str(directory)


@pytest.fixture(scope="module")
def tokens(directory):
    return open_tokens(directory)


@pytest.fixture(scope="module")
def model(directory):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def expected(model, prompt, response, temperature=1.0):
    """Return the log-probs of a response by one forward pass over all of it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(response)[:, None]
        return (logits / temperature).log_softmax(-1).gather(-1, chosen)[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_generated_log_probs_match_a_full_forward_pass(model, tokens, temperature):
    prompts = [tokens.encode(text) for text in ("1+2=", "11+12=", "3=")]
    groups = draw(
        model,
        sequence_limits(model, tokens.tokenizer),
        [GroupRequest(prompt, 4, 12, temperature) for prompt in prompts],
        torch.Generator().manual_seed(1),
        lambda: False,
    )
    lengths = set()
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 4
        for one in group:
            lengths.add(len(one.tokens))
            values = expected(model, prompt, one.tokens, temperature or 1.0)
            assert (values - torch.tensor(one.logprobs)).abs().max() < 1e-4
            assert tokens.tokenizer.eos_token_id not in one.tokens[:-1]
            assert one.truncated == (one.tokens[-1] != tokens.tokenizer.eos_token_id)
        if temperature == 0:
            assert len({tuple(one.tokens) for one in group}) == 1
    if temperature:
        assert len({tuple(one.tokens) for group in groups for one in group}) > 3


def test_greedy_decoding_takes_the_most_probable_token_within_max_positions(model, tokens):
    ends = sequence_limits(model, None)
    prompt = tokens.encode("1+2=" * 7)  # 28 tokens of 32 positions
    ((one,),) = draw(
        model,
        ends,
        [GroupRequest(prompt, 1, 100, 0.0)],
        torch.Generator(),
        lambda: False,
    )
    assert 1 <= len(one.tokens) <= 4
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *one.tokens]])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == one.tokens


def test_a_long_prompt_cuts_no_other_answer_of_its_batch(model, tokens):
    """Each row has the room that its own prompt leaves, and the log-probs that it has alone."""
    endless = SequenceLimits(frozenset(), 0, 32)
    prompts = [tokens.encode(text) for text in ("1+2=" * 7, "3=", "1+2=3+")]
    asks = [GroupRequest(prompt, 2, 20, 0.0) for prompt in prompts]

    def drawn(requests):
        return draw(model, endless, requests, torch.Generator(), lambda: False)

    together, alone = drawn(asks), [group for ask in asks for group in drawn([ask])]
    assert [[len(one.tokens) for one in group] for group in together] == [[4, 4], [20, 20], [20, 20]]
    assert [[one.tokens for one in group] for group in together] == [
        [one.tokens for one in group] for group in alone
    ]
    for prompt, group in zip(prompts, together, strict=True):
        for one in group:
            values = expected(model, prompt, one.tokens)
            assert (values - torch.tensor(one.logprobs)).abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_whose_weights_are_not_finite_fails_the_turn_maker(model, tokens, temperature):
    turns = pytest.importorskip("explorer_hooks.parts.agents.turns")
    errors = pytest.importorskip("explorer_hooks.parts.agents.api_errors")
    spoilt = copy.deepcopy(model)
    with torch.no_grad():
        next(spoilt.parameters()).fill_(float("nan"))
    context = GeneratorContext(tokens, None, None, None, "seed", lambda: False)
    local = LocalGenerator(TransformersHook(spoilt), context, rows=4)
    maker = turns.TurnMaker(local, threads=1, rows=4, hold=LONG, temperature=temperature)

    async def main():
        with pytest.raises(errors.ApiError, match="logits are no numbers"):
            await asyncio.wait_for(maker.make(tokens.encode("1+2="), 4), LONG)

    asyncio.run(main())
    maker.close()
    assert isinstance(maker.failure, EngineDeadError)


def test_generated_groups_carry_the_version_they_were_made_with(model, tokens):
    hook = TransformersHook(model)
    told = []
    local = LocalGenerator(
        hook, GeneratorContext(tokens, None, None, None, "seed", lambda: bool(told)), rows=4
    )
    asks = [GroupRequest(tokens.encode(text), 2, 4, 1.0) for text in ("1+2=", "3+4=", "5+6=", "7" * 40)]
    coming = local.generate(asks)
    first = [next(coming), next(coming), next(coming)]
    hook._label = f"2.7.{CONTENT}"  # what a load leaves behind
    rest = [one for one in coming if one is not None]
    assert [(one.index, one.first, one.last) for one in first if one] == [
        (0, BEFORE_THE_FIRST, BEFORE_THE_FIRST),
        (1, BEFORE_THE_FIRST, BEFORE_THE_FIRST),
    ]
    assert [(one.index, one.first) for one in rest if not one.problem] == [(2, (2, 7))]
    assert [one.index for one in rest if one.problem] == [3]
    told.append(True)
    assert [one for one in local.generate(asks[:1]) if one is not None] == []


def test_the_plain_tokenizer_agrees_with_transformers(directory, tokens):
    plain = PlainTokens(_plain(directory))
    for text in ("1+2=", "19+19="):
        assert plain.encode(text) == tokens.encode(text)
        assert plain.decode(plain.encode(text)) == tokens.decode(tokens.encode(text)) == text
    messages = [{"role": "user", "content": "1+2="}]
    with pytest.raises(ConfigError, match="transformers"):
        plain.encode(messages)
    with pytest.raises(ConfigError, match="chat template"):
        tokens.encode(messages)


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        open_tokens(str(tmp_path))


# --- servers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    made = Completing()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(served, "backoff", lambda attempt: 0.01)


class Engine:
    """What the engine says that it runs, and what was applied."""

    def __init__(self):
        self.running = Running(f"1.4.{CONTENT}")
        self.applied = (1, 4)
        self.told = False

    def generator(self, server, *, retries=2, settle=5.0, timeout=LONG, concurrency=4):
        asked = HttpClient(server.address, token=None, timeout=timeout, ask_timeout=timeout, missing="")
        more = {"concurrency": concurrency, "retries": retries, "settle": settle}
        choice = ApiChoice(asked, "vllm", "policy", "off")
        context = GeneratorContext(
            None, lambda: self.running, None, lambda: self.applied, "", lambda: self.told
        )
        return ServerGenerator(asked, choice, context, **more)


ASKS = [GroupRequest([1, 2, number], 3, 6, 1.0) for number in range(6)]


def made(generator, asks=ASKS):
    found = [one for one in generator.generate(asks) if one is not None]
    assert sorted(one.index for one in found) == list(range(len(asks)))
    return sorted(found, key=lambda one: one.index)


def test_completion_requests_set_every_sampling_option(server):
    for one in made(Engine().generator(server)):
        assert (one.first, one.last, one.problem) == ((1, 4), (1, 4), "")
        assert len(one.responses) == 3
        for rollout in one.responses:
            assert rollout.logprobs == [-0.01 * token for token in rollout.tokens]
            assert rollout.text == " ".join(map(str, rollout.tokens))
            assert not rollout.truncated, "the server said that it stopped"
    body = dict(server.seen)["POST /v1/completions"]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert (body["repetition_penalty"], body["logprobs"], body["stream"]) == (1.0, 0, False)
    assert body["return_token_ids"] is True


def test_the_model_name_is_read_from_the_server(server):
    asked = HttpClient(server.address, token=None, timeout=LONG, ask_timeout=LONG, missing="")
    assert served_model(asked) == "policy"
    server.replies["/v1/models"] = Answer(200, {"data": []})
    with pytest.raises(ConfigError, match="names no model"):
        served_model(asked)


def failing(server, reply, times):
    """Answer the first requests otherwise."""
    left, lock = [times], threading.Lock()
    right = server.post_v1_completions

    def answered(query, body):
        with lock:
            left[0] -= 1
            failed = left[0] >= 0
        if failed:
            reply()
        return right(query, body)

    server.post_v1_completions = answered


def refuse(status):
    def reply():
        raise Answer(status, {"error": {"message": "no"}})

    return reply


def vanish():
    raise VanishError


PASSING = {"500": refuse(500), "503": refuse(503), "429": refuse(429), "vanishes": vanish}


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING)
def test_a_transient_server_error_is_retried(server, reply):
    failing(server, reply, 2)
    assert [one.problem for one in made(Engine().generator(server))] == [""] * len(ASKS)


def test_an_unavailable_server_postpones_its_groups_to_a_later_attempt(server):
    server.replies["/v1/completions"] = Answer(503, {"error": "loading"})
    found = made(Engine().generator(server), ASKS[:2])
    assert [(one.retry, one.responses) for one in found] == [(True, ())] * 2
    assert len(server.seen) == 2 * 3


def test_a_refused_request_is_not_repeated(server):
    server.replies["/v1/completions"] = Answer(400, {"error": {"message": "prompt too long"}})
    (one,) = made(Engine().generator(server), ASKS[:1])
    assert not one.retry
    assert "prompt too long" in one.problem
    assert len(server.seen) == 1


def test_a_hanging_server_times_out(server):
    with server.hung():
        (one,) = made(Engine().generator(server, timeout=0.2, retries=1), ASKS[:1])
    assert one.retry
    assert "0.2 s" in one.problem


def change(**fields):
    def answer(choices):
        for choice in choices:
            for name, value in fields.items():
                choice[name] = value

    return answer


def shorter(choices):
    choices[0]["logprobs"]["token_logprobs"].pop()


def fewer(choices):
    choices.pop()


def no_number(choices):
    choices[0]["logprobs"]["token_logprobs"][0] = float("nan")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (shorter, "log-probs for"),
        (fewer, "choices where 3"),
        (no_number, "not a list of log-probs"),
        (change(finish_reason="abort"), "ended with 'abort'"),
        (change(logprobs=None), "not a list of log-probs"),
        (change(token_ids=[]), "not a list of token ids"),
        (change(token_ids=[1.5]), "not a list of token ids"),
        (change(token_ids=list(range(9)), logprobs={"token_logprobs": [-0.1] * 9}), "of 6 at most"),
    ],
)
def test_a_malformed_response_is_retried_and_then_its_group_is_dropped(server, wrong, what):
    right = server.post_v1_completions

    def answered(query, body):
        answer = right(query, body)
        wrong(answer["choices"])
        return answer

    server.post_v1_completions = answered
    (one,) = made(Engine().generator(server), ASKS[:1])
    assert what in one.problem
    assert not one.retry
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"token_ids": None}, "does not return token ids"), ({"prompt_token_ids": [9]}, "changed the prompt")],
)
def test_a_server_without_token_ids_is_a_config_error(server, fields, what):
    right = server.post_v1_completions

    def answered(query, body):
        answer = right(query, body)
        change(**fields)(answer["choices"])
        return answer

    server.post_v1_completions = answered
    with pytest.raises(ConfigError, match=what):
        made(Engine().generator(server), ASKS[:1])


def test_a_version_change_during_a_group_is_recorded(server):
    engine, right = Engine(), server.post_v1_completions

    def answered(query, body):
        engine.running, engine.applied = Running(f"1.6.{CONTENT}"), (1, 6)
        return right(query, body)

    server.post_v1_completions = answered
    first, second = made(engine.generator(server, concurrency=1), ASKS[:2])
    assert (first.first, first.last, first.oldest) == ((1, 4), (1, 6), (1, 4))
    assert (second.first, second.last) == ((1, 6), (1, 6))


def test_a_restarted_engine_gets_no_work_and_its_group_is_retried(server):
    engine, right = Engine(), server.post_v1_completions

    def answered(query, body):
        engine.running = Running(None)
        return right(query, body)

    server.post_v1_completions = answered
    first, second = made(engine.generator(server, concurrency=1, settle=0.1), ASKS[:2])
    assert first.retry
    assert "restarted" in first.problem
    assert second.retry
    assert "no applied version" in second.problem
    assert len(server.seen) == 1


def test_groups_wait_while_a_version_is_loaded(server):
    engine = Engine()
    engine.running = Running(f"1.4.{CONTENT}", paused=True)
    threading.Timer(0.3, lambda: setattr(engine, "running", Running(f"1.4.{CONTENT}"))).start()
    assert [one.problem for one in made(engine.generator(server), ASKS[:2])] == ["", ""]


def test_an_unreachable_engine_gets_no_work(server):
    engine = Engine()

    def away():
        raise EngineUnreachableError("no answer")

    generator = engine.generator(server)
    generator._context = dataclasses.replace(generator._context, running=away)
    (one,) = made(generator, ASKS[:1])
    assert one.retry
    assert server.seen == []


def test_a_stop_ends_generation_at_once_without_further_requests(server):
    engine = Engine()
    with server.hung():
        coming = engine.generator(server, concurrency=2).generate(ASKS)
        assert next(coming) is None
        engine.told = True
        assert list(coming) == []
    assert len(server.seen) <= 2


def test_only_an_applied_version_that_runs_unpaused_may_work():
    assert version_of(Running(f"1.4.{CONTENT}"), (1, 4)) == (1, 4)
    assert version_of(Running(f"1.4.{CONTENT}", paused=True), (1, 4)) is None
    assert version_of(Running(f"1.3.{CONTENT}"), (1, 4)) is None
    assert version_of(Running(None), (1, 4)) is None
    assert version_of(Running(None), BEFORE_THE_FIRST) == BEFORE_THE_FIRST
    assert version_of(Running(None), None) is None
    for other in ("1.4", "start", "unknown", "1.4.xyz"):
        assert version_of(Running(other), BEFORE_THE_FIRST) is None
        assert version_of(Running(other), (1, 4)) is None
        assert version_after(Running(other), BEFORE_THE_FIRST) is None
    assert version_of(Running(f"1.4.{CONTENT}"), BEFORE_THE_FIRST) is None
    assert version_of(Running(f"1.4.{CONTENT}"), None) is None
    assert version_after(Running(None), BEFORE_THE_FIRST) == BEFORE_THE_FIRST
    assert version_after(Running(None), (1, 4)) is None
    assert version_after(Running(f"2.1.{CONTENT}"), (1, 4)) == (2, 1)


@pytest.mark.parametrize("text", ['{"model": {"type": "Newer"}, "added_tokens": []}', "[]", "{"])
@pytest.mark.parametrize("opened", [open_tokens, lambda path: PlainTokens(_plain(path))])
def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_configuration(directory, tmp_path, text, opened):
    """A release of tokenizers that is older than the file says so by `Exception` itself."""
    copy = shutil.copytree(directory, tmp_path / "model")
    (copy / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        opened(str(copy))


@pytest.mark.parametrize("size", [0, 1000])
def test_a_model_that_was_copied_in_part_is_an_error_of_the_configuration(directory, tmp_path, size):
    copy = shutil.copytree(directory, tmp_path / "model")
    os.truncate(copy / "model.safetensors", size)
    job = job_of(model={"path": str(copy)}, explorer={"tasks": "tasks.jsonl"})
    with pytest.raises(ConfigError, match="the model cannot be loaded: Error while deserializing"):
        open_hook(load_file(write_job(tmp_path / "job.toml", job)))


def test_a_model_that_lacks_a_tensor_is_an_error_of_the_configuration(directory, tmp_path):
    copy = shutil.copytree(directory, tmp_path / "model")
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    job = job_of(model={"path": str(copy)}, explorer={"tasks": "tasks.jsonl"})
    with pytest.raises(ConfigError, match=r"the model has no tensor model\.norm\.weight"):
        open_hook(load_file(write_job(tmp_path / "job.toml", job)))
