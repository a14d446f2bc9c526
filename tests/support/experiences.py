"""Experiences for tests: small, told apart by their tags, written by the real writer."""

from syncd.experience.model import Experience
from syncd.experience.writer import ExperienceWriter
from trainer.experience.fifo import Fifo
from trainer.experience.staleness import Staleness
from trainer.experience.store import ExperienceReader


def make(group="g0", rollout=0, *, tag=0, step=0, generation=1, length=3, **more):
    """Return an experience whose task names it."""
    return Experience(
        tokens=[7, 8, *range(10, 10 + length)],
        prompt_length=2,
        logprobs=more.pop("logprobs", [-0.1 * (place + 1) for place in range(length)]),
        action_mask=[True] * length,
        reward=more.pop("reward", 0.5),
        group=group,
        task=f"task-{tag}",
        rollout=rollout,
        generation=generation,
        step=step,
        **more,
    )


def whole_group(group, size=2, **more):
    """Return all rollouts of a group."""
    return [make(group, rollout, **more) for rollout in range(size)]


def segmented(group, rollout, *, steps, **more):
    """Return all segments of a rollout, each made by a version of its own."""
    return [
        make(group, rollout, step=step, segment=number, segments=len(steps), **more)
        for number, step in enumerate(steps)
    ]


def write(job, explorer, *batches):
    """Write batches as an explorer that starts and ends."""
    with ExperienceWriter(job, explorer) as writer:
        return [writer.write(batch) for batch in batches]


def fifo(job, clock, *, groups=2, size=2, reader=None, staleness=None, **more):
    """Return the strategy over a reader of its own."""
    from syncd.jobfile.sections import DataSection  # needs pydantic, which writers do not

    reader = reader or ExperienceReader(job, clock)
    return Fifo(reader, DataSection(group_size=size, groups=groups, **more), staleness or Staleness())


def names(batch):
    """Return which experiences a batch has."""
    return batch and [
        (origin.explorer, e.group, e.rollout)
        for origin, e in zip(batch.origins, batch.experiences, strict=True)
    ]
