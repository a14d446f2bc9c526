"""A second engine: a bigram model in plain torch, for tests of the loop, and as one that a third party adds.

    PYTHONPATH=.:tests:tests/trainer/engines/installed     engine.name = "tests.tiny"

It makes its own weights from `job.seed` and reads nothing at `model.path`. Its noise comes from each rank's
generator, so a resume that loses the state of a generator is found out. `engine.options`: `vocab` and `width`
(sizes of the weights), `pause` (seconds that a step takes longer).
"""

import copy
import json
import math
import os
import pickle
import time

import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax

from syncd.errors import ConfigError, CorruptDataError
from trainer.engines.files import FileEngine
from trainer.experience.limits import Limits

OPTIONS = {"vocab": 64, "width": 8, "pause": 0.0}


class Bigram(torch.nn.Module):
    """The next token from the last one; the head is the embedding."""

    def __init__(self, vocab, width):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.layer = torch.nn.Linear(width, width)

    def forward(self, tokens):
        return torch.tanh(self.layer(self.embed(tokens))) @ self.embed.weight.T


class AdamW:
    """torch's AdamW by hand, with its form of state: torch.optim imports the compiler, which takes two seconds."""

    def __init__(self, parameters, lr, betas, weight_decay):
        self._parameters, self._state = list(parameters), {}
        places = list(range(len(self._parameters)))
        options = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay, "params": places}
        self.param_groups = [options]

    def zero_grad(self):
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        options = self.param_groups[0]
        lr, (first, second) = options["lr"], options["betas"]
        for place, parameter in enumerate(self._parameters):
            state = self._state.setdefault(place, self._start(parameter))
            state["step"] += 1
            count, mean, square = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]
            parameter.mul_(1 - lr * options["weight_decay"])
            mean.lerp_(parameter.grad, 1 - first)
            square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
            denominator = (square.sqrt() / math.sqrt(1 - second**count)).add_(options["eps"])
            parameter.addcdiv_(mean, denominator, value=-lr / (1 - first**count))

    def state_dict(self):
        return {"state": dict(self._state), "param_groups": [dict(group) for group in self.param_groups]}

    def load_state_dict(self, found):
        self._state = copy.deepcopy(found["state"])
        self.param_groups = copy.deepcopy(found["param_groups"])

    @staticmethod
    def _start(parameter):
        return {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


class TinyEngine(FileEngine):
    """Policy gradient on rewards less the mean of their group; examples are learnt as they are."""

    @property
    def tied(self):
        return ("lm_head.weight",)

    def build(self):
        config = self.context.config
        unknown = set(config.engine.options) - set(OPTIONS)
        if unknown:
            raise ConfigError(f"the tiny engine has no option {', '.join(sorted(unknown))}")
        self.options = OPTIONS | config.engine.options
        torch.manual_seed(config.job.seed)
        self.model = Bigram(self.options["vocab"], self.options["width"])
        optimizer = config.algorithm.optimizer
        self.optimizer = AdamW(
            self.model.parameters(), optimizer.lr, optimizer.betas, weight_decay=optimizer.weight_decay
        )
        torch.manual_seed(config.job.seed * 1000 + self.context.ranks.rank)

    @property
    def limits(self):
        return Limits(self.options["vocab"])

    def train(self, batch, step):
        time.sleep(self.options["pause"])
        largest = max((max(row.tokens) for row in (*batch.experiences, *batch.examples)), default=0)
        if largest >= self.options["vocab"]:
            raise CorruptDataError(f"token {largest} for a model of {self.options['vocab']} tokens")
        samples = rows(batch)
        tokens = sum(int(mask.sum()) for _, _, mask, _ in samples)
        loss = torch.zeros(())
        for ids, prompt, mask, weight in samples[self.context.ranks.rank :: self.context.ranks.world_size]:
            loss = loss - weight * (self._response(ids, prompt) * mask).sum() / tokens
        self.optimizer.zero_grad()
        (loss + 1e-6 * self.model.layer.weight.mul(torch.randn(())).sum()).backward()
        for parameter in self.model.parameters():
            self._add_up(parameter.grad)
        clip = self.context.config.algorithm.optimizer.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip, error_if_nonfinite=True)
        self.optimizer.step()
        return self._metrics(batch, self._add_up(loss.detach().clone()), norm, tokens)

    def export(self):
        for name, tensor in self.model.state_dict().items():
            yield f"model.{name}", tensor
        yield "lm_head.weight", self.model.embed.weight.detach()

    def companions(self):
        sizes = {name: self.options[name] for name in ("vocab", "width")}
        return {
            "config.json": json.dumps({"architectures": ["Bigram"], "model_type": "bigram"} | sizes).encode()
        }

    def training_state(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {self._state_name(): state | {"rng": torch.get_rng_state()}}

    def load_training_state(self, directory):
        rank, written = self.context.ranks.rank, self._written_by(directory)
        state = self._agreed(f"{directory}/tiny_{min(rank, written - 1)}_of_{written}.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        options = self.context.config.algorithm.optimizer
        for group in self.optimizer.param_groups:  # the job's file may have changed since
            group |= {"lr": options.lr, "weight_decay": options.weight_decay, "betas": tuple(options.betas)}
        if rank < written:
            torch.set_rng_state(state["rng"])

    def _written_by(self, directory):
        """Return the number of ranks that wrote a directory; each of them has written all weights."""
        found = {name.partition("_of_")[2].removesuffix(".pt") for name in os.listdir(directory)}
        return max([int(count) for count in found if count.isdigit()], default=self.context.ranks.world_size)

    def _agreed(self, path):
        """Return the state in a file; all ranks raise if one cannot read its own."""
        state, problem = None, None
        try:
            state = torch.load(path)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            problem = CorruptDataError(f"not a training state: {error}", path=path)
        for one in self.context.ranks.gather(problem):
            if one is not None:
                raise one
        return state

    @torch.no_grad()
    def log_probs(self, batch):
        return [self._response(list(row.tokens), row.prompt_length) for row in batch.experiences]

    @property
    def compute_dtype(self):
        return "float32"

    @torch.no_grad()
    def token_logprobs(self, rows):
        return [self._response(list(row), 1).tolist() for row in rows]

    def _response(self, ids, prompt):
        """Return the log-probs of the tokens after the prompt."""
        ids = torch.tensor(ids)
        found = log_softmax(self.model(ids[:-1]), -1).gather(-1, ids[1:, None])[:, 0]
        return found[prompt - 1 :]

    def _add_up(self, tensor):
        if self.context.ranks.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _state_name(self):
        return f"tiny_{self.context.ranks.rank}_of_{self.context.ranks.world_size}.pt"

    def _metrics(self, batch, loss, norm, tokens):
        rewards = [row.reward for row in batch.experiences] or [0.0]
        return {
            "actor/pg_loss": float(loss), "actor/grad_norm": float(norm), "train/tokens": float(tokens),
            "actor/lr": self.optimizer.param_groups[0]["lr"], "critic/score/mean": sum(rewards) / len(rewards),
        }  # fmt: skip


def rows(batch):
    """Return token ids, prompt length, mask of the response and weight of everything that is learnt."""
    rewards = {}
    for group, row in zip(batch.groups, batch.experiences, strict=True):
        if row.segment == 0:
            rewards.setdefault(group, []).append(row.reward)
    found = []
    for row, group, weight in zip(batch.experiences, batch.groups, batch.weights, strict=True):
        mean = sum(rewards[group]) / len(rewards[group])
        found.append(
            (
                list(row.tokens),
                row.prompt_length,
                torch.tensor(list(row.learnt)),
                weight * (row.reward - mean),
            )
        )
    for example in batch.examples:
        length = len(example.tokens) - example.prompt_length
        found.append((list(example.tokens), example.prompt_length, torch.ones(length), 1.0))
    return found
