"""Which tensors of an inspection are listed, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from stream_pack.errors import OptionError, SourceError
from stream_pack.inspection.inspection import InspectedTensor, Inspection, RefusedTensor, Sort
from stream_pack.pipeline.adapt.select import SHOWN_NAMES, matches
from stream_pack.text import listed, quoted

__all__ = ["Choice", "choose"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is listed, in this order."""

    rows: tuple[InspectedTensor, ...]
    refused: tuple[RefusedTensor, ...]


def choose(inspection: Inspection, *, include: str | Iterable[str], sort: Sort | None) -> Choice:
    """What :meth:`Inspection.to_text` and :meth:`Inspection.to_json` list.

    Raises: OptionError; SourceError when ``include`` leaves nothing.
    """
    if sort is not None and sort not in _KEYS:
        raise OptionError(f"sort={quoted(sort)}: expected 'size', 'name' or 'offset'")
    patterns = (include,) if isinstance(include, str) else tuple(include)
    chosen = _matching(inspection, patterns) if patterns else Choice(inspection.rows, inspection.refused)
    return chosen if sort is None else replace(chosen, rows=tuple(sorted(chosen.rows, key=_KEYS[sort])))


def _matching(inspection: Inspection, patterns: Sequence[str]) -> Choice:
    match = matches(patterns)
    rows = tuple(row for row in inspection.rows if match(row.name))
    refused = tuple(one for one in inspection.refused if match(one.name))
    names = [row.name for row in inspection.rows] + [one.name for one in inspection.refused]
    if names and not rows and not refused:
        raise SourceError(
            f"no tensor matches {listed(patterns)} (--include, include=): a pattern must match the whole name; there "
            f"are {listed(names, most=SHOWN_NAMES)}"
        )
    return Choice(rows, refused)


def _place(row: InspectedTensor) -> tuple[bool, str, int]:
    """By file, and where in it; what has no place comes last."""
    return row.file_offset is None, row.file or "", row.file_offset or 0


_KEYS: dict[Sort, Callable[[InspectedTensor], tuple[object, ...]]] = {
    "size": lambda row: (-row.nbytes,),
    "name": lambda row: (row.name,),
    "offset": _place,
}
