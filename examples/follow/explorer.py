"""Your own explorer: follows with a function that loads, samples rollouts, and writes them.

    syncd watch JOB &
    python examples/publish/pytorch.py JOB &
    python examples/follow/explorer.py JOB --name e0

The follower needs only `load`: it calls it with a version that was leased and checked, and that stays on this
host while `load` reads it. If `load` raises, the old weights stay in place, and the load is retried. The explorer
ends when the trainer has left and its last version is applied. Any number of these may run, on any hosts.
"""

import argparse
from itertools import count, pairwise

import torch
from safetensors.torch import load_file

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hooks.callback import CallbackHook
from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from syncd.transports.base import WeightDirectory

VOCABULARY, LENGTH, GROUP = 16, 8, 4


def main() -> None:
    """Follow and explore."""
    options = _options()
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY)  # the model of examples/publish/pytorch.py

    def load(target: WeightDirectory) -> None:
        state = {}
        for shard in target.shards:
            state |= load_file(f"{target.path}/{shard.name}")
        model.load_state_dict(state)

    follow = FollowOptions(stage=options.stage)
    with (
        Follower.open(options.job, CallbackHook(load), options.name, follow) as follower,
        ExperienceWriter(follower.client.job, options.name) as writer,
    ):
        for batch in count(1):
            outcome = follower.turn(timeout=options.pause)
            if outcome.kind == "ended":
                break
            if follower.applied is not None:
                rollouts = [roll_out(model, batch, number, follower.applied) for number in range(GROUP)]
                writer.write(rollouts)
                reward = sum(one.reward for one in rollouts) / GROUP
                print(f"batch {batch}: version {follower.applied}, reward {reward:.2f}", flush=True)


@torch.no_grad()
def roll_out(model: torch.nn.Module, batch: int, number: int, version: tuple[int, int]) -> Experience:
    """Sample one rollout; the reward is the share of tokens that continue the count."""
    tokens, logprobs = [batch % VOCABULARY], []
    for _ in range(LENGTH):
        found = torch.log_softmax(model(torch.tensor(tokens[-1])), -1)
        tokens.append(int(torch.multinomial(found.exp(), 1)))
        logprobs.append(float(found[tokens[-1]]))
    right = sum((one + 1) % VOCABULARY == other for one, other in pairwise(tokens))
    generation, step = version
    return Experience(
        tokens=tokens,
        prompt_length=1,
        logprobs=logprobs,
        action_mask=[True] * LENGTH,
        reward=right / LENGTH,
        group=str(batch),
        task=f"count from {tokens[0]}",
        rollout=number,
        generation=generation,
        step=step,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="the job directory, which exists")
    parser.add_argument("--name", required=True, help="unique among the explorers of the job")
    parser.add_argument("--stage", help="one copy a host, shared by all explorers on it: /dev/shm/syncd")
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds to wait for a version between batches"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
