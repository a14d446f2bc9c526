"""Updates whose gradient is not finite: verl skips them, and too many in a row end the run."""

import math
from collections.abc import Sequence

import structlog

from syncd.errors import CorruptDataError
from trainer.engines.base import Metrics

MOST_SKIPPED = 10  # updates in a row that may be skipped before the run ends


class FiniteUpdates:
    """Counts the updates in a row that were skipped; messages name `table`, the optimizer's in the job's file."""

    def __init__(self, table: str) -> None:
        self._table, self._in_a_row = table, 0

    def is_made(self, norm: float, number: int) -> bool:
        """Return whether the update of a step was made, by the norm of its gradient; log it if it was skipped."""
        if math.isfinite(norm):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        reason = "its gradient is not finite"
        structlog.get_logger().warning("update_skipped", reason=reason, step=number, in_a_row=self._in_a_row)
        if self._in_a_row >= MOST_SKIPPED:
            hint = f"resume from an earlier checkpoint with a lower {self._table}.lr"
            message = f"{MOST_SKIPPED} updates in a row had gradients that are not finite"
            raise CorruptDataError(message, hint=hint)
        return False


def norm_metrics(who: str, norms: Sequence[float]) -> Metrics:
    """Return the mean norm of the gradients of updates that were made, and how many were skipped."""
    made = [norm for norm in norms if math.isfinite(norm)]
    norm = sum(made) / len(made) if made else sum(norms)
    return {f"{who}/grad_norm": norm, f"{who}/updates_skipped": float(len(norms) - len(made))}
