"""How benchmarks are compared: the arithmetic, with figures that are known."""

from __future__ import annotations

import json
from collections.abc import Callable

from perf.contest import Contender, Contest, hold
from perf.contests import CONTESTS


def scripted(name: str, figures: list[float], calls: list[str]) -> Contender:
    """A contender whose figures, the round that does not count included, are given."""
    left = iter(figures)

    def measure() -> float:
        calls.append(name)
        return next(left)

    return Contender(name, measure)


def contest(calls: list[str]) -> Contest:
    return Contest(
        "race",
        "a race",
        (scripted("ours", [99.0, 1.0, 2.0, 3.0], calls), scripted("theirs", [99.0, 2.0, 1.0, 4.0], calls)),
        rounds=3,
        nbytes=4 << 30,
    )


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    result = hold(contest(calls))
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs", "theirs", "ours"]
    assert result.figures == {"ours": [1.0, 2.0, 3.0], "theirs": [2.0, 1.0, 4.0]}


def test_a_ratio_is_taken_round_by_round() -> None:
    # 1/2, 2/1 and 3/4
    assert hold(contest([])).ratios("theirs") == (0.5, 0.75, 2.0)


def test_the_table_shows_medians_rates_and_ratios() -> None:
    title, ours, theirs = hold(contest([])).table().splitlines()
    assert title == "a race  (3 rounds)"
    assert ours.split() == "ours 2.000 s [ 1.000 .. 3.000] 2.00 GiB/s".split()
    assert theirs.endswith("2.00 GiB/s  the first is 0.75 x this [0.50 .. 2.00]")


def test_the_json_line_is_one_line_with_the_same_figures() -> None:
    line = hold(contest([])).to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "name": "race",
        "unit": "s",
        "rounds": 3,
        "nbytes": 4 << 30,
        "medians": {"ours": 2.0, "theirs": 2.0},
        "ratios": {"theirs": [0.5, 0.75, 2.0]},
    }


def test_every_benchmark_says_what_it_measures() -> None:
    described: dict[str, Callable[..., Contest]] = dict(CONTESTS)
    assert [name for name, make in described.items() if not make.__doc__] == []
