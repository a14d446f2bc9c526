"""Versions of tokens: what servers of each kind say is what experiences carry, and nothing is ever guessed."""

import dataclasses
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.fake_servers import Answer
from support.generating import Completing, GeneratingSglang, GeneratingVllm, drawn, logprob, text_of

from explorer_hooks.hook import Running, Unproven
from explorer_hooks.http_client import HttpClient
from explorer_hooks.run.batches import EpochTask, experience_of
from explorer_hooks.run.generation import BEFORE_THE_FIRST, GeneratorContext, GroupRequest
from explorer_hooks.run.rewards import Score
from explorer_hooks.run.served import ServerGenerator
from explorer_hooks.run.server_apis import SCALE_OUT, ApiChoice
from explorer_hooks.run.token_versions import TokenVersions
from explorer_hooks.tasks.task import Task
from syncd.errors import ConfigError
from syncd.experience.model import Span
from syncd.protocol.version import pair_of

LONG = 60.0
OLD, NEW, OTHER = "1.4.0f1e2d3c4b5a6978", "1.5.ffffffffffffffff", "1.5.0000000000000000"
KNOWN = {OLD, NEW, "1.5+a1"}
"""The labels of this job: `OTHER` is of another one."""

ASK = GroupRequest([1, 2, 3], 3, 6, 1.0)


class Engine:
    """What an engine says that it runs, before and after a group."""

    def __init__(self, server, kind, spans="auto"):
        self.server, self.kind, self.spans = server, kind, spans
        self.before = self.after = Running(OLD)
        self.applied = (1, 4)

    def named(self, label):
        return pair_of(label) if label in KNOWN else None

    def result(self, asked=ASK):
        (found,) = self.results(asked)
        return found

    def results(self, *asked):
        told = iter([self.before, self.after] * len(asked))
        client = HttpClient(self.server.address, token=None, timeout=LONG, ask_timeout=LONG, missing="")
        context = GeneratorContext(
            None, lambda: next(told), self.named, lambda: self.applied, "", lambda: False
        )
        choice = ApiChoice(client, self.kind, "policy", self.spans)
        generator = ServerGenerator(client, choice, context, concurrency=1, retries=0, settle=1.0)
        return [one for one in generator.generate(asked) if one is not None]


def stored(response, result, loads=None):
    """Return what is written of a response; `loads` is what is not proven by then."""
    task = EpochTask(0, 0, Task("t", "1+2=", None, {}), ASK.prompt)
    return experience_of(task, "g", 0, response, result, Score(1.0), loads or {})


@pytest.fixture(params=[GeneratingVllm, GeneratingSglang], ids=["vllm", "sglang"])
def server(request):
    made = request.param()
    yield made
    made.stop()


@pytest.fixture
def engine(server):
    return Engine(server, server.kind)


def spans(*parts):
    """Return what a server says: pairs of a label and where its tokens end; the last end is the response's."""

    def said(length):
        found, start = [], 0
        for label, end in parts:
            stop = min(length if end is None else end, length)
            if start < stop:
                found.append({"version": label, "start": start, "end": stop})
            start = max(start, stop)
        return found

    return said


# --- what every kind of server must show --------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 3])
def test_a_server_that_names_versions_is_asked_for_them_with_every_sampling_option(server, engine, samples):
    server.spans = spans((OLD, None))
    result = engine.result(dataclasses.replace(ASK, samples=samples))
    ids = drawn(ASK.prompt, samples, ASK.max_tokens)
    assert [one.tokens for one in result.responses] == ids
    assert [one.logprobs for one in result.responses] == [[logprob(token) for token in row] for row in ids]
    assert [one.text for one in result.responses] == [text_of(row) for row in ids]
    assert {one.versions for one in result.responses} == {TokenVersions((Span(0, 1, 4),))}
    body = dict(server.seen)[f"POST {server.path}"]
    asked = body["sampling_params"]
    assert (asked["n"], asked["temperature"], asked["top_p"], asked["top_k"], asked["min_p"]) == (
        samples, 1.0, 1.0, -1, 0.0
    )  # fmt: skip
    penalties = [asked[f"{name}_penalty"] for name in ("presence", "frequency", "repetition")]
    assert (penalties, body["stream"]) == ([0.0, 0.0, 1.0], False)


def test_each_token_has_the_version_that_the_server_names(server, engine):
    engine.after = Running(NEW)
    server.spans = spans((OLD, 2), (NEW, None))
    result = engine.result()
    assert (result.first, result.last, result.unproven) == ((1, 4), (1, 5), False)
    for one in result.responses:
        rest = (Span(2, 1, 5),) if len(one.tokens) > 2 else ()
        assert one.versions == TokenVersions((Span(0, 1, 4), *rest))
        row = stored(one, result)
        assert (row.generation, row.step, row.spans) == (1, 4, (Span(0, 1, 4), *rest))
        assert row.unproven is None
        assert "versions" not in row.info
        assert row.info["truncated"] is True, "both servers said that it ended at the bound"


def test_a_response_of_the_newer_version_alone_is_not_as_old_as_its_group(server, engine):
    engine.after = Running(NEW)
    server.spans = spans((NEW, None))
    result = engine.result()
    row = stored(result.responses[0], result)
    assert (row.generation, row.step, row.spans) == (1, 5, (Span(0, 1, 5),))


def test_two_labels_of_the_same_weights_are_one_span(server, engine):
    """What a broadcast delivers gets another label once it is published."""
    engine.after = Running(NEW)
    server.spans = spans(("1.5+a1", 1), (NEW, None))
    assert {one.versions for one in engine.result().responses} == {TokenVersions((Span(0, 1, 5),))}


def test_start_weights_are_a_version_before_the_first_one_only(server, engine):
    engine.before = engine.after = Running(None)
    engine.applied = BEFORE_THE_FIRST
    assert engine.result().responses[0].versions == TokenVersions((Span(0, *BEFORE_THE_FIRST),))
    engine.before = engine.after = Running(OLD)
    engine.applied = (1, 4)
    found = engine.result().responses[0]
    assert found.versions == TokenVersions((Span(0, 1, 4),), [True] * len(found.tokens))


@pytest.mark.parametrize("label", ["default", "", "unknown", "1.5", OTHER, "1.6+a1", "x" * 100_000])
def test_tokens_whose_label_names_no_version_of_the_job_are_masked_and_the_oldest_stands_for_them(
    server, engine, label
):
    engine.after = Running(NEW)
    server.spans = spans((NEW, 1), (label, 2), (NEW, None))
    result = engine.result()
    for one in result.responses:
        row = stored(one, result)
        count = len(one.tokens)
        assert row.spans == (Span(0, 1, 5), Span(1, 1, 4), Span(2, 1, 5))[:count]
        assert row.unproven == (None if count == 1 else bytes([0, 1, *[0] * (count - 2)]))
        assert (row.generation, row.step) == (1, 5 if count == 1 else 4)
        assert sum(row.learnt) == max(count - 1, 1)


@pytest.mark.parametrize(
    ("before", "after", "masked"),
    [
        ({}, {}, False),
        ({}, {NEW: Unproven(pending=True)}, True),
        ({}, {NEW: Unproven(1)}, True),
        ({NEW: Unproven(pending=True)}, {NEW: Unproven(1)}, True),
        ({NEW: Unproven(pending=True)}, {}, False),
        ({NEW: Unproven(1)}, {NEW: Unproven(1)}, False),
        ({NEW: Unproven(1)}, {NEW: Unproven(1, pending=True)}, True),
        ({NEW: Unproven(1)}, {NEW: Unproven(2)}, True),
    ],
)
def test_only_tokens_of_versions_without_a_proof_are_masked(server, engine, before, after, masked):
    engine.before, engine.after = Running(OLD, unproven=before), Running(NEW, unproven=after)
    server.spans = spans((OLD, 2), (NEW, None))
    result = engine.result()
    assert result.unproven is masked
    long = 0
    for one in result.responses:
        row, count = stored(one, result, after), len(one.tokens)
        wanted = bytes([0, 0, *[1] * (count - 2)]) if masked and count > 2 else None
        assert row.unproven == wanted
        long += count > 2
    assert long


@pytest.mark.parametrize("names", [True, False], ids=["named", "not named"])
@pytest.mark.parametrize(
    ("before", "pending", "then", "masked"),
    [
        ({}, {NEW: Unproven(pending=True)}, {}, False),
        ({}, {NEW: Unproven(pending=True)}, {NEW: Unproven(1)}, True),
        ({}, {NEW: Unproven(pending=True)}, {NEW: Unproven(pending=True)}, True),
        ({}, {NEW: Unproven(pending=True)}, {NEW: Unproven(1, pending=True)}, True),
        ({NEW: Unproven(1)}, {NEW: Unproven(1, pending=True)}, {NEW: Unproven(1)}, False),
        ({}, {NEW: Unproven(1, pending=True)}, {NEW: Unproven(1)}, True),
        ({}, {NEW: Unproven(pending=True)}, {OTHER: Unproven(1)}, False),
    ],
    ids=["passes", "fails", "does not come", "fails and is tried again", "passes the second time",
         "had failed meanwhile", "passes, and another one fails"],
)  # fmt: skip
def test_tokens_of_a_version_whose_proof_came_later_are_learnt_once_it_has_passed(
    server, engine, names, before, pending, then, masked
):
    """What is doubted is decided when it is written, not when the response ends."""
    engine.before, engine.after = Running(OLD, unproven=before), Running(NEW, unproven=pending)
    server.spans = spans((OLD, 2), (NEW, None)) if names else lambda length: [{"start": 1}]
    result = engine.result()
    rows = [stored(one, result, then) for one in result.responses]
    assert any(len(row.logprobs) > 2 for row in rows)
    for row in rows:
        count = len(row.logprobs)
        doubted = [0, 0, *[1] * (count - 2)] if names else [1] * count
        assert row.unproven == (bytes(doubted) if masked and any(doubted) else None)


def test_a_token_of_no_version_stays_masked_whatever_is_proven(server, engine):
    engine.before, engine.after = Running(OLD), Running(NEW, unproven={NEW: Unproven(pending=True)})
    server.spans = spans((OTHER, 1), (NEW, None))
    result = engine.result()
    for one in result.responses:
        count = len(one.tokens)
        assert stored(one, result, {}).unproven == bytes([1, *[0] * (count - 1)])


def test_a_proof_that_failed_for_another_version_masks_nothing_of_this_one(server, engine):
    engine.after = Running(OLD, unproven={NEW: Unproven(1)})
    server.spans = spans((OLD, None))
    result = engine.result()
    assert result.unproven
    assert [stored(one, result).unproven for one in result.responses] == [None] * ASK.samples


@pytest.mark.parametrize(
    "wrong", ["shorter", "longer", "gap", "overlap", "disorder", "no list", "no text", "true"]
)
def test_versions_that_cannot_be_read_are_counted_and_no_response_is_lost(server, engine, wrong):
    """What is known of the group as a whole counts then, as for a server that names no versions."""
    engine.after = Running(NEW, unproven={NEW: Unproven(1)})
    server.spans = lambda length: broken(wrong, length)
    with capture_logs() as logs:
        result = engine.result()
    assert len(result.responses) == result.unreadable_versions == ASK.samples
    (event,) = [one for one in logs if one["event"] == "token_versions_unreadable"]
    assert (event["log_level"], event["responses"]) == ("warning", ASK.samples)
    assert event["reason"]
    for one in result.responses:
        row = stored(one, result)
        assert (row.spans, row.unproven) == ((Span(0, 1, 4),), bytes([1] * len(one.tokens)))
        assert row.info["versions"] == ["1.4", "1.5"]


def broken(how, length):
    whole = {"version": OLD, "start": 0, "end": length}
    return {
        "shorter": [],
        "longer": [{**whole, "end": length + 1}],
        "gap": [{**whole, "start": 1}],
        "overlap": [whole, {**whole, "start": 0}],
        "disorder": [{**whole, "start": length}, whole],
        "no list": {"0": whole},
        "no text": [{**whole, "version": 4}],
        "true": [{**whole, "end": True, "start": False}],
    }[how]


# --- servers that do not name versions ------------------------------------------------------------------------------


def older_sglang():
    made = GeneratingSglang()
    made.spans = lambda length: None
    return made


@pytest.mark.parametrize(
    ("opened", "kind", "wanted"),
    [(Completing, "vllm", "auto"), (older_sglang, "sglang", "auto"), (GeneratingVllm, "vllm", "off"),
     (GeneratingSglang, "sglang", "off")],
    ids=["vllm without the flag", "sglang that names none", "vllm off", "sglang off"],
)  # fmt: skip
def test_without_versions_of_tokens_a_whole_response_has_the_oldest_and_is_masked_whole(opened, kind, wanted):
    server = opened()
    engine = Engine(server, kind, wanted)
    engine.after = Running(NEW, unproven={NEW: Unproven(1)})
    result = engine.result()
    server.stop()
    assert len(result.responses) == ASK.samples
    assert result.unreadable_versions == 0
    for one in result.responses:
        row = stored(one, result)
        assert one.versions is None
        assert (row.spans, row.unproven) == ((Span(0, 1, 4),), bytes([1] * len(one.tokens)))
        assert row.info["versions"] == ["1.4", "1.5"]


def test_what_makes_vllm_name_versions_is_said_once(monkeypatch):
    server = Completing()
    with capture_logs() as logs:
        Engine(server, "vllm").result()
    server.stop()
    (event,) = [one for one in logs if one["event"] == "token_versions_unavailable"]
    assert "403" in event["reason"]
    assert event["hint"] == SCALE_OUT


@pytest.mark.parametrize(("opened", "kind"), [(Completing, "vllm"), (older_sglang, "sglang")])
def test_required_versions_that_a_server_does_not_name_are_a_config_error(opened, kind):
    server = opened()
    with pytest.raises(ConfigError, match="does not report which version chose which token"):
        Engine(server, kind, "required").result()
    server.stop()


def test_a_group_larger_than_max_num_seqs_is_asked_for_in_parts():
    server = GeneratingVllm()
    right, most = server.post_inference_v1_generate, 2

    def bounded(query, body):
        count = body.get("sampling_params", {}).get("n", 0)
        if count > most:
            said = f"sampling_params.n must be at most the server's max_num_seqs ({most}), got {count}."
            raise Answer(400, {"error": {"message": said, "type": "BadRequestError", "code": 400}})
        return right(query, body)

    server.post_inference_v1_generate = bounded
    asked = dataclasses.replace(ASK, samples=5)
    for result in Engine(server, "vllm").results(asked, asked):
        assert (len(result.responses), result.problem) == (5, "")
        assert all(one.versions is not None for one in result.responses)
    server.stop()
    counts = [body["sampling_params"]["n"] for _, body in server.seen if "sampling_params" in (body or {})]
    assert counts == [5, 2, 2, 1, 2, 2, 1]


def test_required_versions_that_a_server_names_are_read(server):
    server.spans = spans((OLD, None))
    assert Engine(server, server.kind, "required").result().responses[0].versions is not None


@pytest.mark.parametrize("change", ["tokens", "logprobs", "abort", "prompt", "fewer", "nothing"])
def test_an_answer_that_is_none_is_an_error_for_every_kind(server, engine, change):
    right = getattr(server, f"post{server.path.replace('/', '_')}")

    def answered(query, body):
        answer = right(query, body)
        if not body:
            return answer
        return spoilt(answer, change)

    setattr(server, f"post{server.path.replace('/', '_')}", answered)
    if change in ("tokens", "prompt"):
        with pytest.raises(ConfigError, match="token ids" if change == "tokens" else "changed the prompt"):
            engine.result()
    else:
        assert engine.result().problem


def spoilt(answer, change):
    is_vllm = isinstance(answer, dict)
    choices = answer["choices"] if is_vllm else answer
    told = choices[0] if is_vllm else choices[0]["meta_info"]
    if change == "tokens":
        choices[0]["token_ids" if is_vllm else "output_ids"] = None
    elif change == "logprobs":
        told["logprobs" if is_vllm else "output_token_logprobs"] = {"content": [None]} if is_vllm else [[]]
    elif change == "abort":
        told["finish_reason"] = "abort" if is_vllm else {"type": "abort", "message": "shut down"}
    elif change == "prompt" and is_vllm:
        answer["prompt_token_ids"] = [9]
    elif change == "prompt":
        told["prompt_tokens"] = 4
    elif change == "fewer":
        choices.pop()
    else:
        return [None] * 3
    return answer


def test_the_docs_name_the_flag_that_makes_vllm_name_versions():
    text = (Path(__file__).parents[2] / "docs" / "follow-vllm.md").read_text()
    assert SCALE_OUT.rpartition(" ")[2] in text
