"""Which tensors of a catalog to take, under which names, in which order.  Pure: no byte of data is looked at."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import OptionError, SourceError
from stream_pack.format.catalog import Catalog
from stream_pack.format.names import Names
from stream_pack.text import listed, quoted, shown

__all__ = ["SHOWN_NAMES", "Order", "Rename", "Selected", "Selection", "matches", "select", "take_rows"]

Order: TypeAlias = Literal["source", "name"]
"""``"source"``: as the source has them.  ``"name"``: by the UTF-8 bytes of their (new) names."""

SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class Rename:
    """One substitution in every name: the first match of ``pattern``, or all of them (``everywhere``).

    ``text``: as given.
    """

    text: str
    pattern: re.Pattern[str]
    replacement: str
    everywhere: bool

    @classmethod
    def parse(cls, text: str) -> Rename:
        r"""Parse ``s/REGEX/REPLACEMENT/`` or ``s/REGEX/REPLACEMENT/g``, as sed writes them.

        Any character that is no letter, digit, space or backslash may replace the slash; after a backslash it
        means itself.  REGEX and REPLACEMENT are those of Python's :mod:`re`: ``\1`` and ``\g<name>`` are groups.

        Raises: OptionError.
        """
        mark = text[1:2]
        parts = _split(text[2:], mark)
        if not text.startswith("s") or not _may_delimit(mark) or len(parts) != 3:
            raise OptionError(f"invalid rename {quoted(text)}: expected s/REGEX/REPLACEMENT/")
        regex, replacement, flags = parts
        if flags not in ("", "g"):
            raise OptionError(f"invalid rename {quoted(text)}: it ends in {quoted(flags)}, expected 'g' or nothing")
        try:
            pattern = re.compile(regex)
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(
                f"invalid rename {quoted(text)}: {quoted(regex)} is not a regular expression: {error}"
            ) from None
        # In a pattern a backslash makes any mark mean itself; a replacement knows no such escape.
        return cls(text, pattern, replacement.replace("\\" + mark, mark), flags == "g")

    def __call__(self, name: str) -> str:
        """The new name.  Raises: OptionError for a replacement that names a group which is not there."""
        try:
            return self.pattern.sub(self.replacement, name, count=0 if self.everywhere else 1)
        except (re.error, IndexError) as error:
            raise OptionError(
                f"{quoted(self.replacement)} cannot replace {quoted(self.pattern.pattern)} in {quoted(name)}: {error}"
            ) from None


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns are globs (``*``, ``?``, ``[...]``) over whole names of the source, in which case counts.

    A tensor is taken if ``include`` is empty or one of its patterns matches, and none of ``exclude`` does.  Then its
    name goes through ``renames``, one after the other.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    renames: tuple[Callable[[str], str], ...] = ()
    order: Order = "source"

    def __post_init__(self) -> None:
        if self.order not in ("source", "name"):
            raise OptionError(f"order={quoted(str(self.order))}: expected 'source' or 'name'")


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """``catalog``: the tensors taken, over the same storages; ``rows``: where they were in the catalog before.
    ``warnings``: a line for each pattern or rename that has no effect."""

    catalog: Catalog
    rows: NDArray[np.intp]
    warnings: tuple[str, ...]


def select(catalog: Catalog, selection: Selection) -> Selected:
    """The part of ``catalog`` that ``selection`` takes.

    Raises: SourceError when nothing is left, or when two tensors would have one name.
    """
    rows = _chosen(catalog.names, selection)
    names = [catalog.names[row] for row in rows.tolist()]
    warnings = [
        *_unmatched("include", selection.include, catalog.names),
        *_unmatched("exclude", selection.exclude, catalog.names),
    ]
    if selection.renames:
        names, idle = _renamed(names, selection.renames)
        warnings += idle
    if selection.order == "name":
        # By code points, which is the order of the UTF-8 bytes.
        order = sorted(range(len(names)), key=names.__getitem__)
        names = [names[row] for row in order]
        rows = rows[order]
    return Selected(take_rows(catalog, rows, names), rows, tuple(warnings))


def matches(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of the globs, as a function."""
    match = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match
    return lambda name: match(name) is not None


def _chosen(names: Sequence[str], selection: Selection) -> NDArray[np.intp]:
    kept = np.ones(len(names), bool)
    if selection.include:
        kept &= np.fromiter(map(matches(selection.include), names), bool, len(names))
    if selection.exclude:
        kept &= ~np.fromiter(map(matches(selection.exclude), names), bool, len(names))
    if len(names) and not kept.any():
        given = [f"include {quoted(pattern)}" for pattern in selection.include]
        given += [f"exclude {quoted(pattern)}" for pattern in selection.exclude]
        raise SourceError(
            f"no tensor is selected by {', '.join(given)}: a pattern must match the whole name; the source has "
            f"{listed(names, most=SHOWN_NAMES)}"
        )
    return np.flatnonzero(kept)


def _unmatched(option: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """A warning for each pattern that no name matches."""
    for pattern in patterns:
        if not any(map(matches([pattern]), names)):
            such = f", such as {quoted(names[0])}" if names else ""
            yield f"--{option} {quoted(pattern)} ({option}=) matches no tensor: it must match a whole name{such}"


def _renamed(names: Sequence[str], renames: Sequence[Callable[[str], str]]) -> tuple[list[str], list[str]]:
    """The new names, and a warning for each rename that changes none."""
    given: dict[str, str] = {}
    idle = dict.fromkeys(range(len(renames)))
    for name in names:
        new = name
        for number, rename in enumerate(renames):
            before, new = new, rename(new)
            if not isinstance(new, str):
                raise OptionError(f"rename= returned {shown(new)} for {quoted(name)}: expected text")
            if number in idle and new != before:
                del idle[number]
        if new in given:
            raise SourceError(
                f"{quoted(given[new])} and {quoted(name)} would both be named {quoted(new)}: give one of them "
                "another name"
            )
        try:
            new.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{quoted(name)} would be named {quoted(new)}, which is not valid UTF-8") from None
        given[new] = name
    return list(given), [f"{_shown_rename(renames, number)} changes no name" for number in idle]


def _shown_rename(renames: Sequence[Callable[[str], str]], number: int) -> str:
    rename = renames[number]
    if isinstance(rename, Rename):
        return f"--rename {quoted(rename.text)} (rename=)"
    return "the function of rename=" if len(renames) == 1 else f"the function at {number} of rename="


def take_rows(catalog: Catalog, rows: NDArray[np.intp], names: Sequence[str]) -> Catalog:
    """The given tensors in the given order, under the given names."""
    looked_up = catalog.notes or catalog.refused
    new_row = {row: number for number, row in enumerate(rows.tolist())} if looked_up else {}
    return replace(
        catalog,
        names=Names.of(names),
        dtypes=catalog.dtypes[rows],
        dims=catalog.dims.take(rows),
        nbytes=catalog.nbytes[rows],
        storages=catalog.storages[rows],
        starts=catalog.starts[rows],
        source_dtypes=None if catalog.source_dtypes is None else catalog.source_dtypes[rows],
        notes=tuple(sorted((new_row[row], key, value) for row, key, value in catalog.notes if row in new_row)),
        refused={new_row[row]: error for row, error in catalog.refused.items() if row in new_row},
    )


def _split(text: str, mark: str) -> list[str]:
    """``text`` cut at each ``mark`` that no backslash precedes."""
    parts = [""]
    escaped = False
    for character in text:
        if character == mark and not escaped:
            parts.append("")
            continue
        parts[-1] += character
        escaped = character == "\\" and not escaped
    return parts


def _may_delimit(mark: str) -> bool:
    return len(mark) == 1 and not mark.isalnum() and not mark.isspace() and mark != "\\"
