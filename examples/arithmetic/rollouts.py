"""Rollouts of the model in this process: what it writes for a prompt, with exact log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from problems import MAX_RESPONSE, Problem, reward
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response.

    Args:
        prompt: Token ids of the prompt.
        response: Token ids of the response, with the end of the text if it came to it.
        logprobs: Log-probability of each response token, natural logarithm, computed in float32.
        text: The response without the end of the text.
        reward: Its reward.
    """

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    text: str
    reward: float


def roll_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    greedy: bool = False,
) -> list[Rollout]:
    """Return one rollout of each problem, all of them computed as one batch.

    Args:
        model: In float32.
        tokenizer: The model's; it pads on the left.
        problems: A problem that occurs twice gets two rollouts.
        greedy: Take the most probable token; else tokens are drawn at temperature 1 from torch's generator.
    """
    prompts = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    tokens, logprobs = _generate(model, prompts["input_ids"], prompts["attention_mask"], greedy=greedy)
    rollouts = []
    for problem, row, values in zip(problems, tokens.tolist(), logprobs.tolist(), strict=True):
        end = tokenizer.eos_token_id
        length = row.index(end) + 1 if end in row else len(row)
        text = tokenizer.decode(row[: length - 1] if row[length - 1] == end else row)
        prompt = tokenizer(problem.prompt)["input_ids"]
        score = reward(problem.prompt, text)
        rollouts.append(Rollout(prompt, row[:length], values[:length], text, score))
    return rollouts


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    """Return the mean reward; of greedy rollouts this is the accuracy."""
    return sum(rollout.reward for rollout in rollouts) / len(rollouts)


def _generate(
    model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, *, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return response tokens and their log-probs, both of shape (rows, length); what follows an end is padding."""
    chosen = GenerationConfig(
        max_new_tokens=MAX_RESPONSE,
        do_sample=not greedy,
        # Sample from the whole distribution, so that a token's probability is the one that is recorded.
        **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        made = model.generate(input_ids=tokens, attention_mask=mask, generation_config=chosen)
        responses = made.sequences[:, tokens.shape[1] :]
        logits = torch.stack(made.logits, dim=1).float()
        return responses, logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
