"""Columns of text side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stream_pack.text import printable

__all__ = ["cell", "table"]

MAX_CELL = 120
"""Characters of a cell: one long name would widen every row."""


def cell(text: str) -> str:
    """``text`` for a table: printable, and cut to MAX_CELL characters."""
    return _fit(printable(text[: MAX_CELL + 1]), MAX_CELL)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int], width: int | None
) -> Iterator[str]:
    """Columns side by side, ``right`` ones flush right; the first is cut when ``width`` is too small."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    if width is not None:
        rest = sum(widths[1:]) + 2 * (len(widths) - 1)
        widths[0] = max(min(widths[0], width - rest), len(head[0]), 12)
    for row in (head, *rows):
        cells = [_fit(cell, size) for cell, size in zip(row, widths)]
        yield "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(cells, widths))
        ).rstrip()


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
