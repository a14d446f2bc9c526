"""Servers as teachers: those of the fake engines with a tokenizer, and what a real one must show."""

import random
import threading

import pytest

from explorer_hooks.parts.evaluation.tables import TeacherSection
from explorer_hooks.parts.evaluation.teacher import Teacher
from explorer_hooks.run.generation import GroupResult, Response
from explorer_hooks.run.tokens import open_tokens
from support import small_qwen
from support.fake_engines import FakeSglang, FakeVllm
from support.fake_servers import Answer
from syncd.errors import ConfigError

CLOSE = 1e-4
"""Nats between a teacher's log-prob and that of transformers in float32."""


class Tokenizing:
    """Says the token ids of a text as vLLM 0.32.0 and SGLang 0.5.23 do."""

    tokens = None

    def post_tokenize(self, query, body):
        if self.tokens is None:
            raise Answer(500, {"error": {"message": "no tokenizer", "code": 500}})
        assert body["add_special_tokens"] is False
        found = self.tokens.ids_of(body["prompt"])
        return {"tokens": found, "count": len(found), "max_model_len": self.longest}


class TeachingVllm(Tokenizing, FakeVllm):
    kind = "vllm"

    def get_v1_models(self, query, body):
        return {"data": [{"id": "policy", "root": self.started_from, "max_model_len": self.longest}]}


class TeachingSglang(Tokenizing, FakeSglang):
    kind = "sglang"


def section(server, **more):
    """Return how a fake server is asked."""
    return TeacherSection(kind=server.kind, address=server.address, **{"timeout": 20.0, "retries": 1} | more)


def groups(seed, count, size=3):
    """Return prompts, and a group of responses to each."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 250) for _ in range(draw.randint(1, 6))] for _ in range(count)]
    made = []
    for index in range(count):
        lengths = [draw.randint(1, 7) for _ in range(size)]
        ids = [[draw.randrange(3, 250) for _ in range(length)] for length in lengths]
        responses = tuple(Response(one, [-1.0] * len(one)) for one in ids)
        made.append(GroupResult(index, responses))
    return prompts, made


class RealTeaches:
    """What a real server must show as a teacher. Beds are those of the contract of real engines."""

    def test_a_teacher_gives_the_log_probs_of_transformers(self, bed, start_directory, record_line):
        tokens = open_tokens(start_directory)
        asked = TeacherSection(kind=bed.hook_name, address=bed.process.address)
        teacher = Teacher(asked, tokens)
        # SGLang takes the directory as the model's name when it loads weights from one.
        assert teacher.name in ("policy", start_directory)
        prompts, made = groups(4, 3)
        worst = 0.0
        for prompt, group in zip(prompts, made, strict=True):
            found = teacher.taught(group, prompt, threading.Event())
            assert (found.teacher, found.untaught) == (teacher.name, "")
            for one in found.responses:
                right = small_qwen.expected(0, [*prompt, *one.tokens], len(one.tokens))
                apart = [abs(a - b) for a, b in zip(one.teacher_logprobs, right, strict=True)]
                worst = max(worst, *apart)
        record_line(f"{bed.engine} as a teacher: log-probs within {worst:.1e} nats of transformers")
        assert worst < CLOSE

    def test_a_teacher_with_another_tokenizer_is_refused(self, bed, tmp_path):
        tokens = open_tokens(other_tokenizer(tmp_path))
        with pytest.raises(ConfigError, match="the tokenizer of the teacher"):
            Teacher(TeacherSection(kind=bed.hook_name, address=bed.process.address, retries=0), tokens)


def other_tokenizer(directory):
    """Return the directory of a tokenizer in which two letters have changed places."""
    small_qwen.write_tokenizer(directory)
    path = directory / "tokenizer.json"
    text = (
        path.read_text().replace('"a": ', '"later": ').replace('"b": ', '"a": ').replace('"later": ', '"b": ')
    )
    path.write_text(text)
    return str(directory)
