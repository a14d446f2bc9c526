"""Which share of the arithmetic that devices can do a model's updates have used, by verl's own estimate."""

import math
from collections.abc import Iterable
from typing import Any

from verl.utils import flops_counter

from trainer.engines.base import Metrics


class Utilization:
    """Estimates the model FLOPs utilization (MFU) of updates of `name`, actor or critic; `config` is transformers'.

    It estimates nothing on processors, and where verl does not know the device or the architecture.
    """

    def __init__(self, name: str, config: Any, device: str, ranks: int) -> None:
        self._metric, self._ranks = f"perf/mfu/{name}", ranks
        is_known = device == "cuda" and config.model_type in flops_counter.ESTIMATE_FUNC
        has_peak = is_known and math.isfinite(flops_counter.get_device_flops())
        self._counter = flops_counter.FlopsCounter(config) if has_peak else None

    def of(self, lengths: Iterable[int], seconds: float) -> Metrics:
        """Return the metric of updates; `lengths` has the tokens of each row, as often as it was learnt from."""
        rows = list(lengths)
        if self._counter is None or not rows:
            return {}
        reached, peak = self._counter.estimate_flops(rows, seconds)
        return {self._metric: reached / peak / self._ranks}
