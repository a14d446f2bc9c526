"""What the passes of a step take: forward, backward, the optimizer, and the passes before the updates."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from trainer.engines.base import Metrics

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
OLD_LOG_PROBS, REFERENCE = "old_log_prob", "ref"
_NOTHING = ""


class PassTimes:
    """Measures on the device's own clock; the names of its metrics begin with `prefix`.

    A GPU computes behind the program, so marks are events of its stream there: nothing waits for them before
    `seconds` is asked for.
    """

    def __init__(self, device: str, prefix: str = "timing_s/") -> None:
        self._is_cuda, self._prefix = device == "cuda", prefix
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Forget the step before."""
        self._marks.clear()

    def mark(self, name: str) -> None:
        """Count what follows under a name, until the next mark."""
        self._marks.append((name, self._now()))

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self.mark(name)
        try:
            yield
        finally:
            self.mark(_NOTHING)

    @contextmanager
    def passes(self, module: Any, loss: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Count the passes of micro-batches in the body, for which the loss that is yielded is to be used.

        A forward pass goes from the model's call to the end of its loss, a backward pass from there to the next call.
        A model that is split into stages (Megatron) has no such order: nothing is counted.
        """
        if not isinstance(module, torch.nn.Module):
            yield loss
            return

        def timed(*args: Any, **named: Any) -> Any:
            result = loss(*args, **named)
            self.mark(BACKWARD)
            return result

        hook = module.register_forward_pre_hook(lambda *_: self.mark(FORWARD))
        try:
            yield timed
        finally:
            hook.remove()
            self.mark(_NOTHING)

    def seconds(self) -> Metrics:
        """Return the seconds of this rank by name; of a GPU, once it has computed all that was marked."""
        seconds: Metrics = {}
        for (name, begin), (_, end) in pairwise(self._marks):
            if name:
                whole = f"{self._prefix}{name}"
                seconds[whole] = seconds.get(whole, 0.0) + self._between(begin, end)
        return seconds

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self._is_cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
