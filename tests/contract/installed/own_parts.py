"""What another package adds to the trainer: a sample strategy of its own, and a policy loss."""

from syncd.jobfile.model import JobFile
from syncd.protocol.layout import Job
from trainer.experience.batch import SampleStrategy
from trainer.sampling import fifo


class NewestFirst(SampleStrategy):
    """Returns the newest of the groups that `fifo` would return over several steps."""

    def __init__(self, inner, depth):
        self._inner, self._depth, self._kept = inner, depth, []

    def sample(self, step, *, generation):
        """Return the newest whole groups, None if there are not enough."""
        while len(self._kept) < self._depth:
            batch = self._inner.sample(step, generation=generation)
            if batch is None:
                break
            self._kept.append(batch)
        return self._kept.pop() if self._kept else None

    def state_dict(self):
        """Return the state before the groups that are kept were read."""
        return {"kind": "own-newest", "inner": self._inner.state_dict()}

    def load_state_dict(self, state):
        """Resume from a state."""
        self._inner.load_state_dict(state["inner"])

    def commit(self, state):
        """Release what the state does not need."""
        return self._inner.commit(state["inner"])


def newest_first(config: JobFile, job: Job) -> NewestFirst:
    """Return the strategy `own-newest`."""
    return NewestFirst(fifo(config, job), int(config.data.strategy_options.get("depth", 1)))


def no_strategy(_config, _job):
    """Return what is not a strategy."""
    return object()


def reinforce(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode,
    config,
    rollout_is_weights=None,
    scale=1.0,
):
    """Return the loss of REINFORCE, a mean over tokens, times a factor of its own."""
    del old_log_prob, loss_agg_mode, config, rollout_is_weights
    tokens = response_mask.sum().clamp(min=1)
    return -scale * (log_prob * advantages * response_mask).sum() / tokens, {}
