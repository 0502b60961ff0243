"""Proving all of a pack: every checksum, and every rule of the format that opening does not look at.

Nothing stops at the first damage: :class:`VerifyReport` lists all of it, with the bytes and tensors that it hits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from stream_pack import graph
from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    RawPayloadError,
    TrailingBytesError,
    TruncatedError,
)
from stream_pack.head import Head
from stream_pack.header import HEADER_NBYTES
from stream_pack.index import NO_BUFFER, Index
from stream_pack.reader.blocks import (
    Users,
    block_checksums,
    block_error,
    check_root,
    wrong_blocks,
)
from stream_pack.reader.mapping import FileRange, Mapping
from stream_pack.reader.opening import check_footer, check_length, naming, read_head

__all__ = ["Damage", "Progress", "VerifyReport", "verify", "verify_mapped"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

TASK_NBYTES = 32 << 20
"""What a thread does in one go: long against starting it, short against the whole."""
TASK_BLOCKS = 1024
PADDING_STEP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was written, or not as the format has it.

    ``part``: ``"head"``, ``"length"``, ``"graph"``, ``"names"``, ``"notes"``, ``"buffers"``, ``"padding"``,
    ``"block"``, ``"checksums"`` or ``"footer"``.  ``tensors`` are those that are hit, as far as that is known.
    ``buffer``, ``block`` (its number in the buffer) and ``tensor_count`` are given for a block, whose ``tensors`` are
    100 at most of that many.  ``error`` is what :meth:`VerifyReport.raise_if_damaged` raises.

    Units: bytes; the half-open range ``[file_begin, file_end)`` counts from the pack's first byte.
    """

    part: str
    file_begin: int
    file_end: int
    error: FormatError | ChecksumError
    tensors: tuple[str, ...] = ()
    tensor_count: int | None = None
    buffer: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        # A traceback would keep the file mapped as long as the report.
        self.error.__context__ = None
        self.error.with_traceback(None)

    @property
    def message(self) -> str:
        """What is wrong, where, and whose bytes it hits."""
        return str(self.error)

    def to_json(self) -> dict[str, object]:
        """All fields, the error as its message; checksums as 16 hex digits."""
        error = self.error
        checksums = (
            {"expected": f"{error.expected:016x}", "actual": f"{error.actual:016x}"}
            if isinstance(error, ChecksumError)
            else {}
        )
        return {
            "part": self.part,
            "message": self.message,
            "file_begin": self.file_begin,
            "file_end": self.file_end,
            "tensors": list(self.tensors),
            "tensor_count": self.tensor_count,
            "buffer": self.buffer,
            "block": self.block,
            **checksums,
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was verified, and all damage that was found, in the order of the file.

    ``blocks`` and ``nbytes`` are the blocks whose checksums were recomputed, and their bytes.  ``complete`` is False
    when the damage hides where the rest is, so that it could not be verified.
    """

    tensors: int
    blocks: int
    nbytes: int
    complete: bool
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages

    def raise_if_damaged(self) -> None:
        """Raise the error of the first damage, if there is one."""
        if self.damages:
            raise self.damages[0].error

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return {
            "ok": self.ok,
            "complete": self.complete,
            "tensors": self.tensors,
            "blocks": self.blocks,
            "nbytes": self.nbytes,
            "damages": [damage.to_json() for damage in self.damages],
        }


def verify(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    nbytes: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a file that may be too damaged to be opened.

    Arguments: as of :func:`stream_pack.open` and :meth:`Pack.verify`.
    Raises: OSError; NotAPackError, RawPayloadError, NewerVersionError: there is nothing to verify then.  Damage is
    reported, not raised.
    """
    file = FileRange(path, offset=offset, nbytes=nbytes)
    try:
        with naming(file):
            return _verify(file, jobs, progress, contained=offset != 0 or nbytes is not None)
    finally:
        file.close()


def _verify(
    file: FileRange, jobs: int | None, progress: Progress | None, *, contained: bool
) -> VerifyReport:
    try:
        head = read_head(file)
    except (NotAPackError, RawPayloadError, NewerVersionError):
        raise
    except TruncatedError as error:
        return _hidden(Damage("length", file.available, error.expected_nbytes, error))
    except (FormatError, ChecksumError) as error:
        # Where the head ends is part of what cannot be trusted.
        return _hidden(Damage("head", 0, file.available, error))
    damages = []
    try:
        check_length(file, head, contained=contained)
    except TruncatedError as error:
        return _hidden(
            Damage("length", file.available, head.pack_nbytes, error), tensors=len(head.index)
        )
    except TrailingBytesError as error:
        damages.append(Damage("length", head.pack_nbytes, file.available, error))
    mapping = Mapping(file, head.pack_nbytes)
    report = verify_mapped(mapping, head, jobs=jobs, progress=progress)
    return VerifyReport(
        report.tensors, report.blocks, report.nbytes, report.complete, (*report.damages, *damages)
    )


def _hidden(damage: Damage, *, tensors: int = 0) -> VerifyReport:
    return VerifyReport(tensors=tensors, blocks=0, nbytes=0, complete=False, damages=(damage,))


def verify_mapped(
    mapping: Mapping, head: Head, *, jobs: int | None, progress: Progress | None
) -> VerifyReport:
    """Verify a pack whose head is proved and whose length is right.

    Raises: NewerVersionError for its footer; StateError when it is closed meanwhile.
    """
    damages = [
        *_tail_damages(mapping, head),
        *_graph_damages(mapping, head),
        *_order_damages(head),
        *_cover_damages(head),
        *_padding_damages(mapping, head),
        *_block_damages(mapping, head, jobs or _cores(), progress),
    ]
    damages.sort(key=lambda damage: damage.file_begin)
    index = head.index
    return VerifyReport(
        tensors=len(index),
        blocks=index.checksums_nbytes // 8,
        nbytes=int(index.buffer_nbytes.sum()),
        complete=True,
        damages=tuple(damages),
    )


def _cores() -> int:
    # Not cpu_count: a container, or taskset, may allow fewer.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _graph_damages(mapping: Mapping, head: Head) -> Iterator[Damage]:
    """The graph says of every tensor what the index says."""
    begin, end = HEADER_NBYTES, head.index_file_offset
    if begin == end:
        yield Damage("graph", begin, end, FormatError(f"no graph before the index at byte {end}"))
        return
    try:
        count = len(head.index)
        found = graph.decode(memoryview(mapping.array(begin, end - begin)), most=count)
    except FormatError as error:
        yield Damage("graph", begin, end, error)
        return
    index = head.index
    wanted = graph.expected_values(index)
    if len(found.ids) < count:
        text = f"the graph has {len(found.ids)} constants for {count} tensors"
        yield Damage("graph", begin, end, FormatError(text))
        return
    found_ranks = np.diff(found.dims_ends, prepend=0)
    ranks = np.diff(wanted.dims_ends, prepend=0)
    wrong = found_ranks != ranks
    for name in ("datatypes", "num_dims", "nbytes", "offsets"):
        wrong |= getattr(found, name) != getattr(wanted, name)
    same = np.flatnonzero(~wrong)
    # Dims of the tensors whose ranks agree, side by side.
    within = np.arange(int(ranks[same].sum())) - np.repeat(
        np.cumsum(ranks[same]) - ranks[same], ranks[same]
    )
    left = found.dims[np.repeat(found.dims_ends[same] - ranks[same], ranks[same]) + within]
    right = wanted.dims[np.repeat(wanted.dims_ends[same] - ranks[same], ranks[same]) + within]
    wrong[np.repeat(same, ranks[same])[left != right]] = True
    rows = np.flatnonzero(wrong).tolist()
    if rows:
        names = tuple(index.name(row) for row in rows)
        text = f"graph (bytes {begin} to {end}) and index disagree about {len(rows)} tensors, the first is {names[0]!r}"
        yield Damage("graph", begin, end, FormatError(text), tensors=names)


def _order_damages(head: Head) -> Iterator[Damage]:
    """Names are sorted and unique, and so are the keys of each tensor's notes."""
    index = head.index
    begin, end = head.index_file_offset, head.index_file_offset + head.index_nbytes
    names = [index.name_bytes(tensor) for tensor in index.name_order.tolist()]
    for before, after in pairwise(names):
        if before >= after:
            what = "are equal" if before == after else "stand in the wrong order"
            text = f"index: the names {before.decode()!r} and {after.decode()!r} {what}"
            yield Damage(
                "names", begin, end, FormatError(text), tensors=(before.decode(), after.decode())
            )
    keys = list(_note_keys(index))
    for (tensor, key), (next_tensor, next_key) in pairwise(keys):
        if tensor == next_tensor and key >= next_key:
            text = f"index: the notes {key!r} and {next_key!r} of one tensor are not in order"
            yield Damage("notes", begin, end, FormatError(text))


def _cover_damages(head: Head) -> Iterator[Damage]:
    """Every byte of a buffer belongs to a tensor."""
    index = head.index
    held = np.flatnonzero(index.tensor_buffers != NO_BUFFER)
    rows = held[np.argsort(index.offsets[held], kind="stable")]
    begins = index.offsets[rows]
    ends = begins + index.tensor_nbytes[rows]
    reach = np.maximum.accumulate(np.concatenate((np.zeros(1, np.int64), ends)))[:-1]
    covered = np.zeros(len(index.buffer_nbytes), np.int64)
    np.add.at(covered, index.tensor_buffers[rows], np.maximum(ends - np.maximum(begins, reach), 0))
    for buffer in np.flatnonzero(covered != index.buffer_nbytes).tolist():
        begin = head.region_file_offset + int(index.buffer_offsets[buffer])
        nbytes = int(index.buffer_nbytes[buffer])
        text = f"index: of the {nbytes} bytes of buffer {buffer} only {covered[buffer]} belong to a tensor"
        yield Damage("buffers", begin, begin + nbytes, FormatError(text), buffer=buffer)


def _note_keys(index: Index) -> Iterator[tuple[int, bytes]]:
    ends = [0, *index.note_ends.tolist()]
    for note, tensor in enumerate(index.note_tensors.tolist()):
        yield tensor, index.note_text[ends[2 * note] : ends[2 * note + 1]].tobytes()


def _padding_damages(mapping: Mapping, head: Head) -> Iterator[Damage]:
    """Whatever stands between the parts is zero."""
    index = head.index
    yield from _filled(
        mapping,
        head.index_file_offset + head.index_nbytes,
        head.region_file_offset - head.locator_nbytes,
        "head",
    )
    begins = np.concatenate((np.zeros(1, np.int64), index.buffer_offsets + index.buffer_nbytes))
    ends = np.append(index.buffer_offsets, head.region_nbytes)
    for gap in np.flatnonzero(ends > begins).tolist():
        base = head.region_file_offset
        yield from _filled(mapping, base + int(begins[gap]), base + int(ends[gap]), "region")


def _filled(mapping: Mapping, begin: int, end: int, part: str) -> Iterator[Damage]:
    first = last = None
    for at in range(begin, end, PADDING_STEP_NBYTES):
        step = mapping.array(at, min(PADDING_STEP_NBYTES, end - at))
        if step.any():
            where = np.flatnonzero(step)
            first = at + int(where[0]) if first is None else first
            last = at + int(where[-1])
    if first is not None and last is not None:
        text = f"padding in the {part} (bytes {begin} to {end}) is not zero, from byte {first} to {last + 1}"
        yield Damage("padding", first, last + 1, FormatError(text))


def _block_damages(
    mapping: Mapping, head: Head, jobs: int, progress: Progress | None
) -> Iterator[Damage]:
    index = head.index
    checksums = block_checksums(mapping, head)
    step = max(1, min(TASK_BLOCKS, TASK_NBYTES // index.block_nbytes))
    starts = range(0, len(checksums), step)

    def task(first: int) -> list[tuple[int, int]]:
        return wrong_blocks(mapping, head, checksums, first, min(first + step, len(checksums)))

    total = int(index.buffer_nbytes.sum())
    users: Users | None = None
    for first, wrong in zip(starts, _in_threads(task, starts, jobs)):
        for block, actual in wrong:
            users = users or Users(index)
            error = block_error(head, users, block, expected=int(checksums[block]), actual=actual)
            yield Damage(
                "block",
                error.file_begin,
                error.file_end,
                error,
                tensors=error.tensors,
                tensor_count=error.tensor_count,
                buffer=error.buffer,
                block=error.block,
            )
        if progress is not None:
            progress(_nbytes_before(index, min(first + step, len(checksums))), total)


def _in_threads(
    task: Callable[[int], list[tuple[int, int]]], arguments: Sequence[int], jobs: int
) -> Iterator[list[tuple[int, int]]]:
    """Results in the order of the arguments."""
    if jobs == 1 or len(arguments) == 1:
        yield from map(task, arguments)
        return
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(task, arguments)


def _nbytes_before(index: Index, block: int) -> int:
    """Bytes of all blocks with a smaller number."""
    buffer = int(np.searchsorted(index.block_ends, block, side="right"))
    if buffer == len(index.block_ends):
        return int(index.buffer_nbytes.sum())
    within = block - int(index.block_ends[buffer] - index.block_counts[buffer])
    return int(index.buffer_nbytes[:buffer].sum()) + within * index.block_nbytes


def _tail_damages(mapping: Mapping, head: Head) -> Iterator[Damage]:
    try:
        check_footer(mapping.file, head)
    except NewerVersionError:
        raise
    except FormatError as error:
        yield Damage("footer", head.footer_file_offset, head.pack_nbytes, error)
        return
    try:
        check_root(mapping, head)
    except ChecksumError as error:
        yield Damage("checksums", error.file_begin, error.file_end, error)
