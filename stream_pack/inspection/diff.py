"""The public function that compares two files, whatever they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from stream_pack.errors import OptionError, StreamPackError
from stream_pack.format.catalog import Catalog
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.dtypes import DTYPES
from stream_pack.inspection.difference import ChangedTensor, Difference
from stream_pack.inspection.fingerprints import Fingerprints, fingerprints
from stream_pack.inspection.values import FLOATS, differences_of
from stream_pack.pickles.nesting import Key
from stream_pack.pipeline.adapt.source import adapted
from stream_pack.pipeline.source import Source
from stream_pack.sources.open import Convertible
from stream_pack.sources.pack.source import PackSource
from stream_pack.text import quoted
from stream_pack.writer.convert import open_for, spool_for
from stream_pack.writer.flow import Progress
from stream_pack.writer.options import ConvertOptions, Patterns

__all__ = ["diff", "diff_with"]


def diff(
    first: Convertible,
    second: Convertible,
    *,
    values: bool = False,
    key: Key = None,
    ignore_unknown: bool = False,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Difference:
    """Compare the tensors of two files, or of whatever else :func:`convert` takes, by name.

    Bytes are compared by the XXH3-64 of blocks.  Of packs with blocks of one length the checksums in the files are
    taken as they are, so that next to nothing is read; whether a pack still has these bytes, :func:`verify` says.  All
    else is read once, and checked by its own checksums on the way.

    ``values``: of changed float tensors of one shape, also how far their elements are apart; those are read once more,
    so neither may be a pipe.  The other options: as for :func:`convert`, for both.

    Memory: some chunks, and 8 bytes for each block.
    Raises: as :func:`convert` before and while it reads, with ``first`` or ``second`` in the message where that is a
    path; OptionError for ``values`` of a pipe.
    """
    options = ConvertOptions(
        key=key, ignore_unknown=ignore_unknown, include=include, exclude=exclude, jobs=jobs, max_memory=max_memory,
        spool_dir=spool_dir, progress=progress, announce=announce,
    )  # fmt: skip
    return diff_with(first, second, options, values=values)


def diff_with(first: Convertible, second: Convertible, options: ConvertOptions, *, values: bool) -> Difference:
    """:func:`diff`, given its options as one object."""
    if values and not (_can_be_read_again(first) and _can_be_read_again(second)):
        raise OptionError("values (--values) takes a second pass, which no pipe or open file gives: pass paths")
    sides = (first, second)
    with ExitStack() as stack:
        opened = [stack.enter_context(_opened(side, options)) for side in sides]
        block_nbytes = _block_nbytes(opened)
        taken, prints = [], []
        for side, source in zip(sides, opened):
            with _naming(side):
                chosen = adapted(source, options.adaptation)
                taken.append(chosen)
                prints.append(_fingerprints(chosen, source, options, block_nbytes))
        catalogs = (taken[0].catalog, taken[1].catalog)
        found, pairs = _compared(catalogs, (prints[0], prints[1]), block_nbytes)
    if values:
        found = replace(found, changed=_with_values(sides, options, catalogs, found, pairs))
    return found


def _can_be_read_again(source: object) -> bool:
    return not isinstance(source, int) and not hasattr(source, "read") and not isinstance(source, Source)


@contextmanager
def _naming(side: Convertible) -> Iterator[None]:
    """Say which of the two an error is about."""
    try:
        yield
    except StreamPackError as error:
        if isinstance(side, (str, os.PathLike)):
            error.args = (f"{quoted(os.fsdecode(side))}: {error}",)
        raise


def _opened(side: Convertible, options: ConvertOptions) -> Source:
    with _naming(side):
        return open_for(side, options, spool_for(None, options))


def _pack_of(source: Source) -> PackSource | None:
    """``source``, if its checksums can be read before its tensors."""
    return source if isinstance(source, PackSource) and source.traits.chooses_order else None


def _block_nbytes(opened: list[Source]) -> int:
    """The length of blocks that most checksums exist for."""
    packs = [source for source in opened if isinstance(source, PackSource)]
    return packs[0].head.index.block_nbytes if packs else BLOCK_NBYTES


def _fingerprints(chosen: Source, source: Source, options: ConvertOptions, block_nbytes: int) -> Fingerprints:
    return fingerprints(
        chosen,
        _pack_of(source),
        options.settings.means,
        block_nbytes=block_nbytes,
        spool=spool_for(None, options),
        progress=options.progress,
    )


def _compared(
    catalogs: tuple[Catalog, Catalog], prints: tuple[Fingerprints, Fingerprints], block_nbytes: int
) -> tuple[Difference, dict[str, tuple[int, int]]]:
    """The difference, and the rows of both in which each changed tensor is."""
    first, second = catalogs
    rows = {name: row for row, name in enumerate(second.names)}
    removed, changed, pairs, same = [], [], {}, 0
    for row, name in enumerate(first.names):
        other = rows.pop(name, None)
        if other is None:
            removed.append(row)
        elif _identity(first, prints[0], row) == _identity(second, prints[1], other):
            same += 1
        else:
            changed.append(_changed(catalogs, prints, (row, other), block_nbytes))
            pairs[name] = row, other
    renamed = _renamed(catalogs, prints, removed, list(rows.values()))
    gone, come = {old for old, _ in renamed}, {new for _, new in renamed}
    texts = (first.metadata, second.metadata)
    found = Difference(
        added=tuple(name for name, row in rows.items() if row not in come),
        removed=tuple(first.names[row] for row in removed if row not in gone),
        renamed=tuple((first.names[old], second.names[new]) for old, new in renamed),
        changed=tuple(changed),
        same=same,
        metadata=tuple(sorted(key for key in {*texts[0], *texts[1]} if texts[0].get(key) != texts[1].get(key))),
        block_nbytes=block_nbytes,
        read_nbytes=prints[0].read_nbytes + prints[1].read_nbytes,
    )
    return found, pairs


def _identity(catalog: Catalog, prints: Fingerprints, row: int) -> tuple[int, tuple[int, ...], bytes]:
    """What makes two tensors the same, under whatever name."""
    return int(catalog.dtypes[row]), catalog.shape(row), prints.of(row).tobytes()


def _renamed(
    catalogs: tuple[Catalog, Catalog], prints: tuple[Fingerprints, Fingerprints], removed: list[int], added: list[int]
) -> list[tuple[int, int]]:
    """Rows of both that have the same tensor, each at most once; empty tensors have nothing to be known by."""
    by_identity: dict[tuple[int, tuple[int, ...], bytes], list[int]] = {}
    for row in reversed(added):
        if catalogs[1].nbytes[row]:
            by_identity.setdefault(_identity(catalogs[1], prints[1], row), []).append(row)
    pairs = []
    for row in removed:
        found = by_identity.get(_identity(catalogs[0], prints[0], row))
        if found:
            pairs.append((row, found.pop()))
    return pairs


def _changed(
    catalogs: tuple[Catalog, Catalog],
    prints: tuple[Fingerprints, Fingerprints],
    rows: tuple[int, int],
    block_nbytes: int,
) -> ChangedTensor:
    (first, second), (old, new) = catalogs, rows
    nbytes = int(first.nbytes[old]), int(second.nbytes[new])
    ranges = None
    if nbytes[0] == nbytes[1]:
        blocks = np.flatnonzero(prints[0].of(old) != prints[1].of(new))
        starts = np.flatnonzero(np.diff(blocks, prepend=-2) > 1)
        runs = np.split(blocks, starts[1:]) if len(blocks) else []
        ranges = tuple((int(run[0]) * block_nbytes, min((int(run[-1]) + 1) * block_nbytes, nbytes[0])) for run in runs)
    return ChangedTensor(
        first.names[old],
        (DTYPES[first.dtypes[old]].name, DTYPES[second.dtypes[new]].name),
        (first.shape(old), second.shape(new)),
        nbytes,
        ranges,
    )


def _with_values(
    sides: tuple[Convertible, Convertible],
    options: ConvertOptions,
    catalogs: tuple[Catalog, Catalog],
    found: Difference,
    pairs: dict[str, tuple[int, int]],
) -> tuple[ChangedTensor, ...]:
    """The changed tensors, with the differences of their values where they have such."""
    first, second = catalogs
    wanted = [
        tensor.name
        for tensor in found.changed
        if tensor.shapes[0] == tensor.shapes[1]
        and tensor.nbytes[0]
        and {int(first.dtypes[pairs[tensor.name][0]]), int(second.dtypes[pairs[tensor.name][1]])} <= FLOATS
    ]
    with ExitStack() as stack:
        opened = [stack.enter_context(_opened(side, options)) for side in sides]
        taken = (adapted(opened[0], options.adaptation), adapted(opened[1], options.adaptation))
        spools = (spool_for(None, options), spool_for(None, options))
        rows = [pairs[name] for name in wanted]
        known = dict(zip(wanted, differences_of(taken, rows, options.settings.means, spools)))
    return tuple(replace(tensor, values=known.get(tensor.name)) for tensor in found.changed)
