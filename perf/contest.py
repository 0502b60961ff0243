"""Measuring several ways to do the same job: in turns, in one run, so that they meet the same machine.

A single figure says little: disks, caches and clocks drift.  So contenders alternate, each round gives one ratio to the
first contender, and what is shown is the median with the lowest and highest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Contender", "Contest", "Result", "hold", "timed"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the job.  ``measure`` does it once and returns the figure, in the contest's unit."""

    name: str
    measure: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Contest:
    """A job and the ways to do it; the first contender is ours, and what all others are compared with.

    ``unit``: what the figures are; less is better.  ``nbytes``: what is moved, for a rate; 0 when it has none.
    """

    name: str
    title: str
    contenders: Sequence[Contender]
    rounds: int
    unit: str = "s"
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of each contender, one a round, in the order of the rounds."""

    contest: Contest
    figures: dict[str, list[float]]

    def ratios(self, name: str) -> tuple[float, float, float]:
        """Lowest, median and highest, over the rounds, of the first contender's figure to this one's."""
        first = self.figures[self.contest.contenders[0].name]
        ratios = [ours / theirs for ours, theirs in zip(first, self.figures[name], strict=True)]
        return min(ratios), statistics.median(ratios), max(ratios)

    def table(self) -> str:
        """Lines for a person."""
        contest = self.contest
        width = max(len(contender.name) for contender in contest.contenders)
        lines = [f"{contest.title}  ({contest.rounds} rounds)"]
        for number, contender in enumerate(contest.contenders):
            figures = self.figures[contender.name]
            median = statistics.median(figures)
            line = (
                f"  {contender.name:{width}}  {_figure(median)} {contest.unit}  "
                f"[{_figure(min(figures))} .. {_figure(max(figures))}]"
            )
            if contest.nbytes:
                line += f"  {contest.nbytes / median / 2**30:6.2f} GiB/s"
            if number:
                low, median, high = self.ratios(contender.name)
                line += f"  the first is {_ratio(median)} x this [{_ratio(low)} .. {_ratio(high)}]"
            lines.append(line)
        return "\n".join(lines)

    def to_json(self) -> str:
        """One line for a machine: medians, and [lowest, median, highest] of the ratios."""
        contest = self.contest
        return json.dumps(
            {
                "name": contest.name,
                "unit": contest.unit,
                "rounds": contest.rounds,
                "nbytes": contest.nbytes,
                "medians": {name: round(statistics.median(figures), 6) for name, figures in self.figures.items()},
                "ratios": {
                    contender.name: [round(ratio, 4) for ratio in self.ratios(contender.name)]
                    for contender in contest.contenders[1:]
                },
            }
        )


def hold(contest: Contest) -> Result:
    """Let the contenders take turns, each round in another order, after one round that does not count."""
    figures: dict[str, list[float]] = {contender.name: [] for contender in contest.contenders}
    for number in range(contest.rounds + 1):
        first = number % len(contest.contenders)
        for contender in (*contest.contenders[first:], *contest.contenders[:first]):
            figure = contender.measure()
            if number:
                figures[contender.name].append(figure)
    return Result(contest, figures)


def timed(job: Callable[[], object], *, before: Callable[[], object] | None = None) -> Callable[[], float]:
    """A measure: the seconds that ``job`` takes; ``before`` runs first and does not count.  What ``job`` returns
    is dropped after the clock has stopped."""

    def measure() -> float:
        if before is not None:
            before()
        began = time.perf_counter()
        outcome = job()
        seconds = time.perf_counter() - began
        del outcome
        return seconds

    return measure


def _figure(value: float) -> str:
    return f"{value:9.4f}" if value < 1 else f"{value:9.3f}" if value < 100 else f"{value:9.1f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
