"""An explorer of one's own without torch: explore.py JOB NAME JOURNAL [options]

It follows with a light engine until the trainer is gone and its last version is applied. With --steps it writes as
many batches of experiences, one group each, and takes versions by the style that is named; each experience says
which bytes the engine held.
"""

import argparse
import time

from light_engine import LightEngine

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hooks.callback import CallbackHook
from syncd.client.sync_policy import SyncStyle, explorer_needs_sync

LIMIT = 60.0
BEFORE_THE_FIRST = (1, 0)


def main():
    options = _options()
    engine = LightEngine(options.journal, options.hold, options.hang_at)
    hook = CallbackHook(engine.load, lambda: engine.label, abort=engine.abort)
    follow = FollowOptions(
        stage=options.stage, poll=options.poll, ttl=options.ttl, check_every=0.2, backoff=0.05, verify="size"
    )
    with Follower.open(options.job, hook, options.name, follow) as follower:
        if options.steps:
            explore(options, follower, engine)
        # Bounded: with the trainer gone and everything applied it ends, whatever else has happened by then.
        deadline = time.monotonic() + options.limit
        outcome = follower.run(lambda: time.monotonic() > deadline)
        assert outcome.kind == "ended", outcome


def explore(options, follower, engine):
    """Write the batches of this explorer's own steps, each with the version that runs."""
    from syncd.experience.writer import ExperienceWriter

    style = SyncStyle(options.style)
    with ExperienceWriter(follower.client.job, options.name) as writer:
        for step in range(1, options.steps + 1):
            writer.write(rollouts(options.name, step, follower.applied or BEFORE_THE_FIRST, engine))
            time.sleep(options.pause)
            # Who never waits may be done before a slow trainer has begun: the last step but one waits for a version.
            unmet = step == options.steps - 1 and follower.applied is None
            waits = style is not SyncStyle.FULLY_ASYNC or unmet
            if style is SyncStyle.FULLY_ASYNC or explorer_needs_sync(step, options.interval):
                follower.turn(LIMIT if waits else 0.0, ask=style is SyncStyle.EXPLORER_DRIVEN)


def rollouts(name, step, pair, engine):
    """Return one group of two rollouts."""
    from syncd.experience.model import Experience

    generation, version = pair
    return [
        Experience(
            tokens=[1 + step, 5, 6, 7 + number],
            prompt_length=2,
            logprobs=[-0.1, -0.7],
            action_mask=[True, True],
            reward=float(number),
            group=f"{name}-{step}",
            task=f"task-{step}",
            rollout=number,
            generation=generation,
            step=version,
            info={"weights": engine.weights},
        )
        for number in range(2)
    ]


def _options():
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("name")
    parser.add_argument("journal")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--style", default="fully_async")
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--hang-at", type=int)
    parser.add_argument("--stage")
    parser.add_argument("--poll", type=float, default=0.02)
    parser.add_argument("--ttl", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=LIMIT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
