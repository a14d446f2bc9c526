"""Figures of one step, gathered pass by pass on each rank and made into one number over all of them."""

from dataclasses import dataclass, field

from syncd.transports.ranks import Ranks
from trainer.engines.base import Metrics


@dataclass
class Figures:
    """Sums, weighted means and maxima by name.

    Args:
        sums: Sums, and of means the sums of what is weighted. Names that are there from the start are 0 unless
            something comes, so that the keys of all steps are the same.
        weights: Of those that are means, the sums of the weights.
        tops: Maxima.
    """

    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    tops: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add to a figure that is the sum over passes and ranks."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, name: str, value: float, weight: float) -> None:
        """Add to a figure that is the mean over passes and ranks: `value` is that of `weight` tokens."""
        self.add(name, value * weight)
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def top(self, name: str, value: float) -> None:
        """Raise a maximum."""
        self.tops[name] = max(self.tops.get(name, value), value)

    def over(self, ranks: Ranks) -> Metrics:
        """Return the figures of all ranks as one, on all ranks."""
        whole = Figures()
        for one in ranks.gather(self):
            whole._take(one)
        means = {name: value / (whole.weights.get(name) or 1.0) for name, value in whole.sums.items()}
        return means | whole.tops

    def _take(self, other: "Figures") -> None:
        for name, value in other.sums.items():
            self.add(name, value)
        for name, weight in other.weights.items():
            self.weights[name] = self.weights.get(name, 0.0) + weight
        for name, value in other.tops.items():
            self.top(name, value)
