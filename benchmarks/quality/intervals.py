"""Is a trainer worse? Said with an interval, against a margin that was fixed before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from statistics import fmean, variance
from typing import Literal

Change = Literal["not worse", "worse", "undecided"]
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Ours − theirs, turned so that more is better for us."""

    mean: float
    low: float
    high: float

    def verdict(self, margin: float) -> Change:
        """Not worse: the whole interval is above −margin. Worse: all of it is below."""
        if self.low > -margin:
            return "not worse"
        return "worse" if self.high < -margin else "undecided"


def welch(ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool) -> Difference:
    """The interval of the difference of two means, whose spreads may differ (Welch's t)."""
    if min(len(ours), len(theirs)) < 2:
        raise ValueError(f"an interval needs two runs of each; found {len(ours)} and {len(theirs)}")
    from scipy.stats import t

    sign = 1.0 if higher_is_better else -1.0
    mean = sign * (fmean(ours) - fmean(theirs))
    parts = [variance(values) / len(values) for values in (ours, theirs)]
    error = sqrt(sum(parts))
    if error == 0 or isnan(error):
        return Difference(mean, mean, mean)
    freedom = error**4 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)
    )
    reach = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Difference(mean, mean - reach, mean + reach)
