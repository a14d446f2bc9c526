"""A teacher gives each group the log-probs of its responses, or why it has none; it must have the same tokens."""

import threading

import pytest
from support import fake_answers, small_qwen
from support.fake_servers import Answer, VanishError
from support.teaching import TeachingSglang, TeachingVllm, groups, other_tokenizer, section

from explorer_hooks.parts.evaluation.teacher import TaughtGenerator, Teacher
from explorer_hooks.run.generation import Generator, GroupRequest, GroupResult, Response
from explorer_hooks.run.tokens import PlainTokens, _plain
from syncd.errors import ConfigError, EngineUnreachableError

LONG = 60.0


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokens")
    small_qwen.write_tokenizer(directory)
    return PlainTokens(_plain(str(directory)))


@pytest.fixture(params=[TeachingVllm, TeachingSglang], ids=["vllm", "sglang"])
def server(request, tokens):
    server = request.param()
    server.tokens = tokens
    yield server
    server.stop()


class Made(Generator):
    """Yields groups that are there already, with turns in which none is."""

    def __init__(self, results):
        self.results = results

    def generate(self, requests):
        for result in self.results:
            yield None
            yield result


def asks(prompts):
    return [GroupRequest(prompt, 3, 8, 1.0) for prompt in prompts]


def read(server, tokens, prompts, made, stop=lambda: False, **more):
    """Return the groups as the teacher leaves them, in the order of the requests."""
    generator = TaughtGenerator(Made(made), Teacher(section(server, **more), tokens), stop)
    found = [one for one in generator.generate(asks(prompts)) if one is not None]
    return sorted(found, key=lambda one: one.index)


def test_each_response_gets_the_log_probs_of_its_own_tokens(server, tokens):
    prompts, made = groups(1, 9)
    found = read(server, tokens, prompts, made, concurrency=3)
    assert [one.index for one in found] == list(range(9))
    for prompt, before, after in zip(prompts, made, found, strict=True):
        assert (after.teacher, after.untaught) == ("policy", "")
        for old, new in zip(before.responses, after.responses, strict=True):
            assert (new.tokens, new.logprobs) == (old.tokens, old.logprobs)
            right = fake_answers.log_probs(server.weights, [*prompt, *old.tokens])[-len(old.tokens) :]
            assert list(new.teacher_logprobs) == pytest.approx(right, abs=1e-6)


def test_a_group_without_responses_is_not_given_to_the_teacher(server, tokens):
    prompts, made = groups(2, 2)
    failed = GroupResult(0, problem="the engine is away", retry=True)
    found = read(server, tokens, prompts, [failed, made[1]])
    assert found[0] == failed
    assert found[1].teacher == "policy"


def failing(server, reply, times):
    """Answer the first requests for log-probs otherwise."""
    name = "post_v1_completions" if server.kind == "vllm" else "post_generate"
    right, left = getattr(server, name), [times]

    def answered(query, body):
        left[0] -= 1
        if left[0] >= 0:
            return reply()
        return right(query, body)

    setattr(server, name, answered)


def refused():
    raise Answer(500, {"error": {"message": "out of memory", "code": 500}})


def vanishes():
    raise VanishError


WRONG = {"500": refused, "vanishes": vanishes, "no answer": dict, "empty": lambda: {"choices": []}}


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG)
def test_a_failed_request_is_repeated_and_then_leaves_the_group_without_log_probs(server, tokens, reply):
    prompts, made = groups(3, 1)
    failing(server, reply, 1)
    assert read(server, tokens, prompts, made)[0].teacher == "policy"
    failing(server, reply, 2)
    (one,) = read(server, tokens, prompts, made)
    assert one.untaught.startswith("the teacher gives no log-probs: ")
    assert [response.teacher_logprobs for response in one.responses] == [None] * 3


def test_a_token_that_the_tokenizer_lacks_is_never_sent(server, tokens):
    (prompt, *_), _ = groups(4, 1)
    made = [GroupResult(0, (Response([5, tokens.size], [-1.0, -1.0]),))]
    (one,) = read(server, tokens, [prompt], made)
    assert f"has no token {tokens.size}" in one.untaught
    assert not [path for path in server.paths() if path.endswith(("completions", "generate"))]


def test_a_teacher_that_hangs_is_given_up_when_the_run_stops(server, tokens):
    prompts, made = groups(5, 2)
    teacher, stop = Teacher(section(server), tokens), threading.Event()
    with server.hung():
        coming = TaughtGenerator(Made(made), teacher, stop.is_set).generate(asks(prompts))
        assert [next(coming) for _ in range(4)] == [None] * 4
        stop.set()
        assert [one for one in coming if one is not None] == []


def test_a_vllm_that_serves_adapters_is_no_teacher(server, tokens):
    cards = server.get_v1_models({}, None)["data"]
    server.replies["/v1/models"] = lambda: {"data": [*cards, {"id": "a", "root": "/a", "parent": "policy"}]}
    if server.kind == "sglang":
        Teacher(section(server), tokens)
        return
    with pytest.raises(ConfigError, match="serves adapters") as error:
        Teacher(section(server), tokens)
    assert "--enable-lora" in error.value.hint


def test_a_key_that_the_server_refuses_ends_the_run(server, tokens):
    prompts, made = groups(6, 2)
    teacher = Teacher(section(server), tokens)
    server.token = "other"
    with pytest.raises(ConfigError, match=r"answers POST .* with 401"):
        list(TaughtGenerator(Made(made), teacher, lambda: False).generate(asks(prompts)))


def test_a_teacher_with_other_tokens_is_refused_at_the_start(server, tokens, tmp_path):
    server.tokens = PlainTokens(_plain(other_tokenizer(tmp_path)))
    with pytest.raises(ConfigError, match='the tokenizer of the teacher "policy" differs') as caught:
        Teacher(section(server), tokens)
    assert "model.path" in caught.value.hint


def test_a_teacher_that_does_not_say_its_tokens_is_refused(server, tokens):
    server.tokens = None
    with pytest.raises(ConfigError, match="does not return its tokens"):
        Teacher(section(server), tokens)


def test_a_teacher_that_is_not_there_is_reported_after_the_retries(server, tokens):
    with server.gone(), pytest.raises(EngineUnreachableError):
        Teacher(section(server), tokens)
