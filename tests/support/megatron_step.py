"""One step of GRPO by plain torch and transformers: what a step of an engine must come to."""

from dataclasses import dataclass


@dataclass
class Step:
    """The loss before a step, the norm of its gradient, and the weights after it."""

    loss: float
    norm: float
    weights: dict


def expected_step(path, batch):
    """Return the step that the settings of `samples.configured` ask for, on the policy that has the log-probs."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    tokens = sum(sum(row.action_mask) for row in batch.experiences)
    loss = sum(
        _row_loss(model, row, advantage)
        for row, advantage in zip(batch.experiences, _advantages(batch), strict=True)
    )
    loss = loss / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Step(float(loss.detach()), float(norm), weights)


def _advantages(batch):
    """Return each reward's distance from the mean of its group in standard deviations, times the row's weight."""
    import torch

    groups = {}
    for number, group in enumerate(batch.groups):
        groups.setdefault(group, []).append(number)
    found = [0.0] * len(batch.experiences)
    for numbers in groups.values():
        rewards = torch.tensor([batch.experiences[number].reward for number in numbers])
        for number, value in zip(numbers, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
            found[number] = float(value) * batch.weights[number]
    return found


def _row_loss(model, row, advantage):
    import torch

    tokens = torch.tensor([list(row.tokens)])
    whole = model(tokens).logits[0, row.prompt_length - 1 : -1].log_softmax(-1)
    chosen = whole.gather(1, tokens[0, row.prompt_length :, None])[:, 0]
    ratio = (chosen - chosen.detach()).exp()
    return -(ratio * advantage * torch.tensor(list(row.action_mask))).sum()
