"""Long lists of tensors made short: names that differ in a number only become one pattern.

``layers.0.wq`` to ``layers.31.wq``, of one dtype and shape, are ``layers.{0..31}.wq``; ``h.{0..31}.experts.{0..7}.w1``
stands for 256.  A pattern stands for exactly the names that it spells, as in a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from stream_pack.inspection.inspection import InspectedTensor

__all__ = ["Folded", "fold"]

MAX_NAME = 500
"""Characters of a name that is looked at: a longer one is no model's."""

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
"""A number that no zero leads, so that it can be written in one way only."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Tensors that are listed as one.  ``name``: of a single one, or the pattern of all."""

    name: str
    tensors: tuple[InspectedTensor, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """``words`` of the name: text and numbers by turns, where ``{0..3}`` may have taken the place of a number."""

    words: tuple[str, ...]
    tensors: tuple[InspectedTensor, ...]


def fold(rows: Iterable[InspectedTensor]) -> list[Folded]:
    """``rows`` as they are to be listed, each pattern where the first of its tensors was.

    What is tied, or has a fault or an order of its own, stays alone.
    """
    lines = [_Line(_words(row), (row,)) for row in rows]
    # From the last number to the first: layers have the same number of experts more often than the other way round.
    for at in range(max((len(line.words) for line in lines), default=0) - 2, 0, -2):
        lines = list(_folded_at(lines, at))
    return [Folded("".join(line.words), line.tensors) for line in lines]


def _words(row: InspectedTensor) -> tuple[str, ...]:
    special = row.shared_with, row.inside, row.fault, row.dim_order
    if len(row.name) > MAX_NAME or any(value is not None for value in special):
        return (row.name,)
    return tuple(_NUMBER.split(row.name))


def _folded_at(lines: list[_Line], at: int) -> Iterator[_Line]:
    """Fold the lines whose word ``at`` is a number, and which are alike otherwise."""
    alike: dict[object, list[int]] = {}
    for place, line in enumerate(lines):
        if len(line.words) > at and line.words[at].isdigit():
            alike.setdefault(_rest(line, at), []).append(place)
    made: dict[int, _Line] = {}
    gone: set[int] = set()
    for places in alike.values():
        numbered = sorted((int(lines[place].words[at]), place) for place in places)
        # Numbers that follow each other differ from their ranks by the same.
        for _, run in groupby(enumerate(numbered), key=lambda item: item[1][0] - item[0]):
            members = [pair for _, pair in run]
            if len(members) > 1:
                first = min(place for _, place in members)
                gone.update(place for _, place in members)
                made[first] = _joined([lines[place] for _, place in members], at)
    for place, line in enumerate(lines):
        if place in made:
            yield made[place]
        elif place not in gone:
            yield line


def _rest(line: _Line, at: int) -> object:
    first = line.tensors[0]
    return line.words[:at], line.words[at + 1 :], first.dtype, first.shape, first.quantization


def _joined(lines: list[_Line], at: int) -> _Line:
    """One line for all of ``lines``, in the order of the number ``at``."""
    words = lines[0].words
    pattern = f"{{{words[at]}..{lines[-1].words[at]}}}"
    tensors = tuple(tensor for line in lines for tensor in line.tensors)
    return _Line((*words[:at], pattern, *words[at + 1 :]), tensors)
