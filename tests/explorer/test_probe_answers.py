"""Answers to probes that are none: each is a failed load that says what is wrong, and never a number to compare."""

import itertools
import json
import time
import types
from dataclasses import dataclass

import pytest
from support import fake_answers
from support.engine_beds import LoraBed, SglangBed, SglangLoraBed, VllmBed
from support.fake_servers import Answer
from support.hook_contract import load

from explorer_hooks.hook import HookOptions, ProbeAnswer
from explorer_hooks.hooks import callback as callback_hook
from explorer_hooks.hooks.callback import CallbackHook
from syncd.errors import ConfigError, EngineUnreachableError, LoadFailedError

ROWS = [[3, 1, 4, 1, 5], [2, 7]]
COMPLETIONS, GENERATE = "/v1/completions", "/generate"


@pytest.fixture
def vllm(tmp_path):
    with VllmBed(tmp_path) as bed:
        yield bed


@pytest.fixture
def sglang(tmp_path):
    with SglangBed(tmp_path) as bed:
        yield bed


@dataclass
class Instead:
    """What is answered in place of a document."""

    document: object


def spoilt(bed, path, spoil, *, probe=True):
    """Have the engine answer as ever, but for what a function does to the document of one of the two requests."""
    route = getattr(bed.engine, f"post_{path.strip('/').replace('/', '_')}")

    def answered(query, body):
        answer = route(query, body)
        is_probe = not body.keys().isdisjoint({"prompt_logprobs", "logprob_start_len", "logprob_token_ids"})
        if is_probe is not probe:
            return answer
        changed = spoil(answer)
        return json.dumps(changed.document if isinstance(changed, Instead) else answer).encode()

    setattr(bed.engine, route.__name__, answered)


def refused(hook, rows=ROWS):
    with pytest.raises(LoadFailedError) as error:
        hook.probe(None, rows)
    assert error.value.hint
    return str(error.value)


def test_an_answer_of_vllm_is_read(vllm):
    hook = vllm.open()
    target = vllm.target((1, 10))
    load(hook, target)
    answer = hook.probe(target, ROWS)
    weights = vllm.engine.weights
    assert answer.logprobs == tuple(tuple(fake_answers.log_probs(weights, row)) for row in ROWS)
    assert answer.fresh == answer.cached


def entry(answer, at=0, position=1):
    return next(iter(answer["choices"][at]["prompt_logprobs"][position].values()))


def renamed(answer):
    answer["choices"][0]["prompt_logprobs"][1] = {"2": {"logprob": -1.0}}


VLLM = {
    "no choices": (dict.clear, "no choices"),
    "a list": (lambda _: Instead([1]), "no choices"),
    "a choice is missing": (lambda a: a["choices"].pop(), "2 entries instead of 3"),
    "the same choice twice": (lambda a: a["choices"][1].update(index=0), "choices [0, 0, 2]"),
    "a choice without an index": (lambda a: a["choices"][0].pop("index"), "no index"),
    "a choice without log-probs": (lambda a: a["choices"][0].pop("prompt_logprobs"), "no prompt_logprobs"),
    "null for log-probs": (lambda a: a["choices"][0].update(prompt_logprobs=None), "prompt_logprobs is None"),
    "a position is missing": (lambda a: a["choices"][0]["prompt_logprobs"].pop(), "4 entries instead of 5"),
    "a position is null": (lambda a: a["choices"][0]["prompt_logprobs"].__setitem__(2, None), "no 4"),
    "another token": (renamed, "no 1"),
    "no log-prob": (lambda a: entry(a).pop("logprob"), "no logprob"),
    "a text": (lambda a: entry(a).update(logprob="-1.0"), "'-1.0' instead of int"),
    "true": (lambda a: entry(a).update(logprob=True), "logprob is True"),
    "not a number": (lambda a: entry(a).update(logprob=float("nan")), "nan is no log-prob"),
    "infinite": (lambda a: entry(a).update(logprob=float("-inf")), "-inf is no log-prob"),
    "a logit": (lambda a: entry(a).update(logprob=3.5), "3.5 is no log-prob"),
}


@pytest.mark.parametrize("case", VLLM)
def test_a_malformed_answer_of_vllm_is_a_failed_load(vllm, case):
    spoil, message = VLLM[case]
    spoilt(vllm, COMPLETIONS, spoil)
    told = refused(vllm.open())
    assert message in told
    assert COMPLETIONS in told


def following(answer):
    return answer["choices"][0]["logprobs"]["top_logprobs"][0]


FOLLOWING = {
    "a choice is missing": (lambda a: a["choices"].pop(), "4 entries instead of 5"),
    "no log-probs": (lambda a: a["choices"][0].update(logprobs=None), "logprobs is None"),
    "an older vLLM, which ignores what it does not know": (
        lambda a: following(a).clear(),
        "no token_id:1 in",
    ),
    "infinite": (lambda a: following(a).update({"token_id:1": float("-inf")}), "-inf is no log-prob"),
}


@pytest.mark.parametrize("case", FOLLOWING)
def test_a_malformed_answer_of_vllm_with_adapters_is_a_failed_load(tmp_path, case):
    spoil, message = FOLLOWING[case]
    with LoraBed(tmp_path) as bed:
        spoilt(bed, COMPLETIONS, spoil)
        assert message in refused(bed.open())


@pytest.mark.fault("vLLM ends at a request for the log-probs of a prompt if it serves adapters of a head")
def test_a_vllm_that_serves_adapters_is_not_asked_for_the_log_probs_of_a_prompt(vllm):
    vllm.engine.serves_adapters = True
    hook, target = vllm.open(), vllm.target((1, 10))
    load(hook, target)
    answer = hook.probe(target, ROWS)
    assert answer.logprobs == tuple(tuple(fake_answers.log_probs(vllm.engine.weights, row)) for row in ROWS)
    assert answer.fresh == answer.cached
    assert hook.current_version().label == target.label


VLLM_NEXT = {
    "no token": (lambda a: a["choices"][0].pop("token_ids"), "no token_ids"),
    "two tokens": (lambda a: a["choices"][0]["token_ids"].append(4), "2 entries instead of 1"),
    "a text": (lambda a: a["choices"][0].update(token_ids=["4"]), "'4' instead of int"),
    "no log-prob": (lambda a: a["choices"][0].update(logprobs=None), "logprobs is None"),
    "null": (lambda a: a["choices"][0]["logprobs"].update(token_logprobs=[None]), "None instead of int"),
}


@pytest.mark.parametrize("case", VLLM_NEXT)
def test_a_malformed_next_token_of_vllm_is_a_failed_load(vllm, case):
    spoil, message = VLLM_NEXT[case]
    spoilt(vllm, COMPLETIONS, spoil, probe=False)
    assert message in refused(vllm.open())


def pairs(answer):
    return answer[0]["meta_info"]["input_token_logprobs"]


SGLANG = {
    "an object": (lambda a: Instead(a[0]), "instead of list"),
    "an answer is missing": (lambda a: a.pop(), "2 answers to 3 prompts"),
    "no meta_info": (lambda a: a[0].pop("meta_info"), "no meta_info"),
    "no log-probs": (lambda a: a[0]["meta_info"].pop("input_token_logprobs"), "no input_token_logprobs"),
    "a position is missing": (lambda a: pairs(a).pop(), "4 entries instead of 5"),
    "another token": (lambda a: pairs(a)[1].__setitem__(1, 77), "of other tokens"),
    "an empty position": (lambda a: pairs(a).__setitem__(2, []), "no 1 in []"),
    "null": (lambda a: pairs(a)[2].__setitem__(0, None), "None instead of int"),
    "not a number": (lambda a: pairs(a)[2].__setitem__(0, float("nan")), "nan is no log-prob"),
    "a probability": (lambda a: pairs(a)[2].__setitem__(0, 0.25), "0.25 is no log-prob"),
}


@pytest.mark.parametrize("case", SGLANG)
def test_a_malformed_answer_of_sglang_is_a_failed_load(sglang, case):
    spoil, message = SGLANG[case]
    spoilt(sglang, GENERATE, spoil)
    told = refused(sglang.open())
    assert message in told
    assert GENERATE in told


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
@pytest.mark.parametrize("status", [400, 500, 503])
def test_an_error_of_the_server_is_a_failed_load_with_its_message(vllm, sglang, path, status):
    bed = vllm if path == COMPLETIONS else sglang
    bed.engine.replies[path] = Answer(status, {"error": {"message": "no logprobs with pipeline parallelism"}})
    told = refused(bed.open())
    assert f"{status}: no logprobs with pipeline parallelism" in told


def test_an_answer_that_is_no_json_is_a_failed_load(vllm, sglang):
    for bed, path in ((vllm, COMPLETIONS), (sglang, GENERATE)):
        bed.engine.replies[path] = lambda: b"<html>"
        refused(bed.open())


def test_a_server_that_ends_within_the_request_is_unreachable(sglang):
    hook = sglang.open()
    sglang.engine.replies[GENERATE] = lambda: sglang.engine._generation({}, [fake_answers.VOCABULARY])
    with pytest.raises(EngineUnreachableError):
        hook.probe(None, ROWS)


@pytest.mark.parametrize("bed_type", [VllmBed, SglangBed, LoraBed, SglangLoraBed])
def test_probe_false_asks_nothing(tmp_path, bed_type):
    with bed_type(tmp_path, probe="false") as bed:
        assert bed.open().probes == ""
    with bed_type(tmp_path) as bed:
        assert bed.open().probes == "serving"


@pytest.mark.parametrize(("longest", "length"), [(4096, 80), (60, 44), (17, 1), (12, 0), (None, 80)])
def test_the_long_prompt_is_longer_than_a_block_and_shorter_than_the_model_s_longest(vllm, longest, length):
    vllm.engine.longest = 4096
    card = {"id": "policy", "root": "/start", "parent": None, "max_model_len": longest}
    vllm.engine.replies["/v1/models"] = lambda: {"data": [card]}
    answer = vllm.open().probe(None, ROWS)
    prompts = [body["prompt"] for path, body in vllm.engine.seen if path == f"POST {COMPLETIONS}"]
    assert (answer.cached is not None) is (length > 0)
    if length:
        assert len(prompts[0]) == length
        assert prompts[1][:2] == ROWS
        assert prompts[1][2][:-1] == prompts[0] == (list(itertools.chain(*ROWS)) * 20)[:length]
    assert len(prompts) == (2 if length else 1)


def test_a_quantised_engine_does_not_say_its_dtype(vllm, sglang):
    config = {"model_config": {"dtype": "torch.bfloat16", "quantization": "fp8"}}
    vllm.engine.replies["/server_info"] = lambda: {"vllm_config": config}
    assert vllm.open().dtype() is None
    config["model_config"]["quantization"] = None
    assert vllm.open().dtype() == "bfloat16"
    info = {"dtype": "auto", "quantization": None}
    sglang.engine.replies["/server_info"] = lambda: info
    assert sglang.open().dtype() is None
    info["dtype"] = "half"
    assert sglang.open().dtype() == "float16"


@pytest.mark.parametrize(
    ("dtype", "quantization", "cache", "flags"),
    [
        ("bfloat16", None, "auto", ""),
        ("bfloat16", None, "bfloat16", ""),
        ("bfloat16", None, None, ""),
        ("bfloat16", None, "fp8", "--kv-cache-dtype fp8"),
        ("float32", None, "bfloat16", "--kv-cache-dtype bfloat16"),
        ("half", "fp8", "fp8_e5m2", "--quantization fp8 --kv-cache-dtype fp8_e5m2"),
    ],
)
def test_flags_by_which_an_engine_rounds_are_known(vllm, sglang, dtype, quantization, cache, flags):
    model = {"dtype": f"torch.{dtype}", "quantization": quantization}
    parts = {"model_config": model, "cache_config": {"cache_dtype": cache}}
    vllm.engine.replies["/server_info"] = lambda: {"vllm_config": parts}
    info = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": cache}
    sglang.engine.replies["/server_info"] = lambda: info
    for hook in (vllm.open(), sglang.open()):
        assert hook.rounding() == flags
        assert (hook.dtype() is None) is bool(flags)


def test_a_slow_description_of_the_engine_is_awaited_as_a_load_is(tmp_path):
    """Real vLLM starts other programs for its first answer; a question may take less time than that."""
    with VllmBed(tmp_path, ask_timeout="0.3") as bed:
        right = bed.engine.get_server_info

        def slow(query, body):
            time.sleep(1)
            return right(query, body)

        bed.engine.get_server_info = slow
        assert bed.open().dtype() == "float32"


RIGHT = [[-1.0, -2.0, -3.0, -4.0], [-5]]


def calling(probe):
    return CallbackHook(lambda target: None, probe=probe)


def test_what_a_callback_returns_is_its_answer():
    assert calling(lambda tokens: RIGHT).probe(None, ROWS) == ProbeAnswer(((-1, -2, -3, -4), (-5,)))
    whole = ProbeAnswer(((-1, -2, -3, -4), (-5,)), -1.0, -2.0)
    assert calling(lambda tokens: whole).probe(None, ROWS) == whole


@pytest.mark.parametrize(
    "wrong",
    [None, 5, RIGHT[:1], [*RIGHT, [1]], [RIGHT[0], []], [RIGHT[0], ["x"]], [RIGHT[0], [float("nan")]]],
)
def test_what_is_no_answer_of_a_callback_is_a_failed_load(wrong):
    assert "no answer" in refused(calling(lambda tokens: wrong))


def test_an_object_with_probe_answers_probes_and_one_without_does_not(monkeypatch):
    own = types.SimpleNamespace(load=lambda target: None)
    monkeypatch.setattr(callback_hook, "imported", lambda address: own)
    assert CallbackHook.from_options(HookOptions("mine")).probes == ""
    own.probe = lambda tokens: RIGHT
    hook = CallbackHook.from_options(HookOptions("mine"))
    assert (hook.probes, hook.dtype()) == ("serving", None)
    own.probes, own.dtype = "held", "bfloat16"
    hook = CallbackHook.from_options(HookOptions("mine"))
    assert (hook.probes, hook.dtype()) == ("held", "bfloat16")
    own.probes = "later"
    with pytest.raises(ConfigError, match="later"):
        CallbackHook.from_options(HookOptions("mine"))
