"""A trainer that broadcasts, by the real loop, to ready explorers, and judges the experiences that it trains on.

teach.py FILE JOB MEMBERS           begins once so many explorers take part

Each step adds noise of its own to the weights, so those of any step are known, and whoever made a rollout can be
found out by its log-probs. It writes, into JOB.trainer.json, how each broadcast ended, which ways were chosen, the
digest of its weights, and of each experience that it took: its version, its age, and how far its log-probs are from
those of that very version and of the nearest other one.
"""

import json
import sys
import tomllib

import torch
from receive import digest, sockets
from support.trainers import make_trainer
from transformers import AutoModelForCausalLM

from syncd.client.broadcast_control import BroadcastControl
from syncd.jobfile.model import JobFile
from syncd.parts.broadcast.send import BroadcastSender
from syncd.synchronizer import Synchronizer
from trainer import auto_method
from trainer.engines.files import FileEngine

LONG = 120.0
NOISE = 0.05
SMALL_BUCKET = 128 << 10


class Teacher(FileEngine):
    """Knows the weights of every step."""

    tied = ("lm_head.weight",)

    def build(self):
        path = self.context.config.model.path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.known = {0: self._state()}
        self.found = []

    def train(self, batch, step):
        for row, age in zip(batch.experiences, batch.ages, strict=True):
            others = [self._off(row, other) for other in self.known if other != row.step]
            one = {"generation": row.generation, "step": row.step, "age": age, "trained": step}
            self.found.append(one | {"own": self._off(row, row.step), "other": min(others, default=None)})
        noise = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(NOISE * torch.randn(parameter.shape, generator=noise))
        self.known[step] = self._state()
        return {"critic/score/mean": 0.0}

    def export(self):
        yield from self.model.state_dict().items()

    def companions(self):
        return {"config.json": self.model.config.to_json_string().encode()}

    def training_state(self):
        return {"state.pt": self.model.state_dict()}

    def load_training_state(self, directory):
        self.model.load_state_dict(torch.load(f"{directory}/state.pt"))

    def _state(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def _off(self, row, step):
        """Return how far the recorded log-probs are from those of a step's weights, at most."""
        self.judge.load_state_dict(self.known[step])
        tokens = torch.tensor(list(row.tokens))
        chosen = self.judge(tokens[None, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return float((chosen[row.prompt_length - 1 :] - torch.tensor(list(row.logprobs))).abs().max())


def main(file, job, members):
    torch.set_num_threads(1)
    with open(file, "rb") as opened:
        config = JobFile.model_validate(tomllib.load(opened))
    ends, send = [], BroadcastSender.broadcast
    BroadcastSender.broadcast = lambda self, step, *rest: ends.append([step, send(self, step, *rest)])
    ways, choose = [], auto_method.choose_method
    auto_method.choose_method = lambda now: (
        chosen := choose(now),
        ways.append([chosen.method, chosen.reason]),
    )[0]
    with Synchronizer.open(job, "trainer", timeout=LONG) as sync:
        sync.wait_for(lambda: len(BroadcastControl(sync).members("gloo")) >= int(members))
        made, _ = make_trainer(config, sync, engine=Teacher)
        made.prepare()
        made.engine.senders["nccl"]._bucket = SMALL_BUCKET
        made.train()
        made.shutdown()
        sync.wait_for(lambda: sync.get_latest_model_version() == made.train_step_num)
        found = {"ends": ends, "ways": ways, "digest": digest(made.engine.model), "found": made.engine.found}
    with open(f"{job}.trainer.json", "w", encoding="ascii") as written:
        json.dump(found | {"sockets": sockets()}, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
