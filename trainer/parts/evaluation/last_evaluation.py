"""The evaluation of a run's last version, which explorers make once the trainer has ended."""

import time
from collections.abc import Callable

from syncd.client.client import Client
from syncd.jobfile.evaluation import produced_by
from syncd.jobfile.model import JobFile
from trainer.parts.evaluation.watch import EvaluationWatch
from trainer.reporting.figures import span

EVERY = 0.5  # seconds between two looks
_OF_A_SET = "/reward"  # how the name of a figure ends that each set has


class LastEvaluation:
    def __init__(self, config: JobFile, client: Client, watch: EvaluationWatch) -> None:
        self._configured = set(produced_by(config.explorer) or ())
        self._client, self._watch, self._limit = client, watch, config.trainer.evaluation_wait

    def wait(self, step: int, is_stopped: Callable[[], bool], note: Callable[[str], None]) -> bool:
        """Wait while an explorer may still evaluate a version; return false if one may when the time is over."""
        end, is_noted = time.monotonic() + self._limit, False
        while self._limit and not is_stopped() and self.is_awaited(step):
            if time.monotonic() >= end:
                return False
            if not is_noted:
                note(f"waiting for the evaluation of step {step}, at most {span(self._limit)}")
                is_noted = True
            time.sleep(EVERY)
        return True

    def is_awaited(self, step: int) -> bool:
        """Return whether some set has no figures of the last step yet, and an explorer that evaluates lives."""
        evaluations = self._watch.all_figures()
        sets = {name for figures in evaluations for name in figures if name.endswith(_OF_A_SET)}
        sets |= {name for name in self._configured if name.endswith(_OF_A_SET)}
        measured = {name for figures in evaluations if figures["eval/step"] == step for name in figures}
        if sets <= measured:
            return False
        living, evaluators = self._client.explorers.living().keys(), self._watch.evaluators()
        return bool(living & evaluators if evaluators else living)


class JobEvaluations(EvaluationWatch):
    """The evaluations of a trainer's own job: the figures that come later than their steps."""

    def __init__(self, config: JobFile, client: Client) -> None:
        super().__init__(client.job.root)
        self._config, self._client = config, client

    def wait_for_last(self, step: int, is_stopped: Callable[[], bool], note: Callable[[str], None]) -> bool:
        return LastEvaluation(self._config, self._client, self).wait(step, is_stopped, note)
