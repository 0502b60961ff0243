"""How names, lists, counts and sizes are written in messages.

A name that comes from a file may be megabytes long and may hold anything.  Every message that shows one passes it
through :func:`quoted` or :func:`listed`, so that a message stays short and one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice

__all__ = ["MAX_LISTED", "counted", "human_nbytes", "listed", "printable", "quoted", "shown"]

MAX_QUOTED = 200
"""Characters of a name that are shown: more than any sensible name has, and a few lines of a terminal."""

MAX_LISTED = 5
"""Names that are shown of many: enough to see what they have in common."""


def quoted(name: object, *, most: int = MAX_QUOTED) -> str:
    """``name`` in quotes, escaped as by ``repr``, cut to about ``most`` characters: ``'model.wq'``.

    What a caller passed instead of a name is shown as it is: ``3``.
    """
    cut = isinstance(name, str | bytes) and len(name) > most
    text = repr(name[:most] if isinstance(name, str | bytes) else name)
    if len(text) > 2 * most:  # escapes take up to ten characters each
        return text[: 2 * most] + "..."
    return text + "..." if cut else text


def shown(value: object) -> str:
    """A value from a file, as parsed from JSON: numbers as they are, text as by :func:`quoted`, of others the type."""
    if isinstance(value, str | bytes):
        return quoted(value)
    if value is None or isinstance(value, bool | int | float):
        text = repr(value)
        return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."
    return f"<{type(value).__name__}>"


def listed(
    names: Iterable[str],
    *,
    most: int = MAX_LISTED,
    total: int | None = None,
    separator: str = ", ",
    show: Callable[[str], str] = quoted,
) -> str:
    """The first ``most`` of ``names``, quoted, and how many more there are: ``'a', 'b' and 3 more``.

    ``total`` says how many there are where ``names`` holds only the first of them.  ``show=str`` is for texts that are
    short and printable already, such as sentences that quote a name.
    """
    if total is None:
        names = names if isinstance(names, Collection) else list(names)
        total = len(names)
    text = separator.join(map(show, islice(names, most)))
    return f"{text} and {total - most} more" if total > most else text


def printable(text: str) -> str:
    """``text`` on one line, with everything that is not printable escaped, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """``"1 tensor"``, ``"2 tensors"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_nbytes(nbytes: float) -> str:
    """Bytes in IEC units, three digits: ``"1.50 GiB"``."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = "B"
    while abs(nbytes) >= 1024:
        nbytes, unit = nbytes / 1024, next(units)
    digits = 2 if abs(nbytes) < 10 else 1 if abs(nbytes) < 100 else 0
    return f"{nbytes:.{digits}f} {unit}"
