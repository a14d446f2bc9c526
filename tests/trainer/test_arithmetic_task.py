"""The arithmetic task: its problems, its reward, its demonstrations, its model and tokenizer, and rollouts."""

import json
import os
import subprocess
import sys
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ARITHMETIC = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "arithmetic")
sys.path.insert(0, ARITHMETIC)

from problems import LEAST, LIMIT, MAX_RESPONSE, Problem, make_sft_data, problems, reward, tasks  # noqa: E402
from rollouts import mean_reward, roll_out  # noqa: E402
from tiny_model import END, PAD, UNKNOWN, make_model  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a directory in which make.py has run, as a process."""
    directory = tmp_path_factory.mktemp("made")
    command = [sys.executable, f"{ARITHMETIC}/make.py", str(directory), "--seed", "5", "--examples", "50"]
    subprocess.run(command, check=True, timeout=120)
    return directory


@pytest.fixture(scope="module")
def tokenizer(made):
    return AutoTokenizer.from_pretrained(made / "model")


@pytest.fixture(scope="module")
def model(made):
    return AutoModelForCausalLM.from_pretrained(made / "model").eval()


def test_train_and_test_splits_are_disjoint_and_complete():
    train, test = problems("train"), problems("test")
    assert not set(train) & set(test)
    assert len(train) + len(test) == (LIMIT - LEAST) ** 2
    assert 200 <= len(test) < len(train) / 2


def test_tasks_are_determined_by_seed_and_split():
    first, again, other = (list(islice(tasks(seed, "train"), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert {problem.split for problem in first} == {"train"}
    assert {problem.split for problem in islice(tasks(1, "test"), 50)} == {"test"}


@pytest.mark.parametrize(
    ("response", "score"), [("25", 1.0), ("24", 0.0), ("", 0.0), ("025", 0.0), ("25 ", 0.0), ("٢٥", 0.0)]
)
def test_the_reward_is_one_for_the_exact_answer_only(response, score):
    assert reward("7+18=", response) == score


def test_the_reward_refuses_a_malformed_prompt():
    with pytest.raises(ValueError, match="not a prompt"):
        reward("7*18=", "126")


def test_demonstrations_forget_to_carry_at_the_configured_rate(tmp_path):
    make_sft_data(tmp_path / "careless", 3, 2000)
    make_sft_data(tmp_path / "right", 3, 100, forgetfulness=0.0)
    rows = [json.loads(line) for line in (tmp_path / "careless").read_text().splitlines()]
    problems_asked = [_problem(row["prompt"]) for row in rows]
    carried = [
        float(row["response"]) == problem.left + problem.right
        for row, problem in zip(rows, problems_asked, strict=True)
        if problem.without_carry != problem.answer
    ]
    assert len(carried) > 500
    assert 0.35 < sum(carried) / len(carried) < 0.45
    assert {problem.split for problem in problems_asked} == {"train"}
    assert all(
        row["response"] == problem.answer
        for row, problem in zip(rows, problems_asked, strict=True)
        if problem.without_carry == problem.answer
    )
    right = [json.loads(line) for line in (tmp_path / "right").read_text().splitlines()]
    assert all(reward(row["prompt"], row["response"]) == 1.0 for row in right)


def _problem(prompt):
    left, right = prompt.rstrip("=").split("+")
    return Problem(int(left), int(right))


def test_make_writes_model_tasks_and_demonstrations(made, model):
    assert len((made / "sft.jsonl").read_text().splitlines()) == 50
    trained, held_out = (
        [json.loads(line) for line in (made / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "held-out.jsonl")
    )
    assert len(trained) + len(held_out) == (LIMIT - LEAST) ** 2
    assert all(reward(task["prompt"], task["answer"]) == 1 for task in trained + held_out)
    assert not {task["id"] for task in trained} & {task["id"] for task in held_out}
    assert 200_000 < sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


def test_equal_seeds_make_equal_files_and_other_seeds_others(made, tmp_path):
    for seed in (5, 6):
        make_model(tmp_path / str(seed), seed, tied=False)
        make_sft_data(tmp_path / str(seed) / "sft.jsonl", seed, 50)
    for ours, theirs in (("model.safetensors", "model/model.safetensors"), ("sft.jsonl", "sft.jsonl")):
        assert (tmp_path / "5" / ours).read_bytes() == (made / theirs).read_bytes()
        assert (tmp_path / "6" / ours).read_bytes() != (made / theirs).read_bytes()


def test_the_tokenizer_maps_each_character_to_one_token_and_back(tokenizer):
    tokens = tokenizer("17+25=")["input_ids"]
    assert len(tokens) == 6
    assert tokenizer.decode(tokens) == "17+25="
    assert tokenizer("1?")["input_ids"] == [tokens[0], tokenizer.convert_tokens_to_ids(UNKNOWN)]
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    padded = tokenizer(["1+2=", "17+25="], padding=True)
    assert padded["attention_mask"] == [[0, 0, 1, 1, 1, 1], [1] * 6]


def test_rollout_log_probs_match_a_forward_pass_over_each_alone(model, tokenizer):
    torch.manual_seed(0)
    rollouts = roll_out(model, tokenizer, [Problem(3, 4), Problem(13, 4), Problem(13, 14)] * 8)
    for rollout in rollouts:
        tokens = torch.tensor([rollout.prompt + rollout.response])
        with torch.inference_mode():
            logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, tokens[0, 1:, None])[len(rollout.prompt) - 1 :, 0]
        assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=1e-5, rtol=0)
    # An untrained model ends some early and others not at all.
    assert {len(rollout.response) for rollout in rollouts} > {MAX_RESPONSE}


def test_rollouts_stop_at_the_end_token_and_are_sampled_independently(model, tokenizer):
    torch.manual_seed(1)
    rollouts = roll_out(model, tokenizer, [Problem(3, 4)] * 64)
    for rollout in rollouts:
        assert tokenizer.eos_token_id not in rollout.response[:-1]
        assert 1 <= len(rollout.response) <= MAX_RESPONSE
        assert rollout.text == tokenizer.decode(rollout.response).removesuffix(END)
    assert len({rollout.text for rollout in rollouts}) > 10
    greedy = roll_out(model, tokenizer, [Problem(3, 4)] * 4, greedy=True)
    assert len({rollout.text for rollout in greedy}) == 1


class _Knows:
    """Stands in for a model that has learnt the task: gives each problem the tokens of its answer."""

    def __init__(self, model, tokenizer, answers):
        self.config, self._rows = model.config, [tokenizer(f"{text}{END}")["input_ids"] for text in answers]
        self._vocabulary = len(tokenizer)

    def generate(self, *, input_ids, **_):
        width = max(map(len, self._rows))
        rows = torch.tensor([row + [0] * (width - len(row)) for row in self._rows])
        logits = tuple(torch.zeros(len(rows), self._vocabulary) for _ in range(width))
        return type("Made", (), {"sequences": torch.cat((input_ids, rows), 1), "logits": logits})


def test_rollout_rewards_match_the_answers(model, tokenizer):
    knows = _Knows(model, tokenizer, ["7", "16", "17"])
    rollouts = roll_out(knows, tokenizer, [Problem(3, 4), Problem(13, 4), Problem(13, 4)])
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0]
    assert mean_reward(rollouts) == pytest.approx(2 / 3)
