"""Proof of a whole pack: every checksum, and every rule of the format that opening does not check.

Verification does not stop at the first damage: :class:`VerifyReport` lists all, with the bytes and tensors affected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from stream_pack.arguments.jobs import check_number, cores
from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    RawPayloadError,
    TrailingBytesError,
    TruncatedError,
)
from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, sniff
from stream_pack.format.head import Head
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.format.proof import Users, block_error, prove_checksums, prove_length, wrong_blocks
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.reader.blocks import block_checksums
from stream_pack.reader.damage import Damage, VerifyReport, hiding_the_rest
from stream_pack.reader.mapping import FileRange, Mapping
from stream_pack.reader.opening import naming, read_footer, read_head
from stream_pack.reader.verify_et_file import verify_et_file
from stream_pack.text import counted, listed, quoted

__all__ = ["Damage", "Progress", "VerifyReport", "verify", "verify_mapped"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes verified, bytes in total)."""

TASK_NBYTES = 32 << 20
"""What a thread verifies in one task: long compared with starting it, short compared with the whole."""
TASK_BLOCKS = 1024
PADDING_STEP_NBYTES = 1 << 20


def verify(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    nbytes: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a file, even one too damaged to be opened: what ``stream-pack verify`` does.

    A file that ExecuTorch wrote (a program, a raw payload, a data file) has no checksums: the faults that can be seen
    are reported as damage, and packs inside it are verified.

    Arguments: those of :func:`stream_pack.open` and :meth:`Pack.verify`.
    Raises: OSError; OptionError, LimitError; NotAPackError, RawPayloadError, NewerVersionError where there is nothing
    to verify.  Damage is reported, not raised.
    """
    check_number("jobs", jobs, least=1, optional=True)
    with closing(FileRange(path, offset=offset, nbytes=nbytes)) as file, naming(file):
        return _verify(file, jobs, progress, contained=offset != 0 or nbytes is not None)


def _verify(file: FileRange, jobs: int | None, progress: Progress | None, *, contained: bool) -> VerifyReport:
    try:
        head = read_head(file)
    except NewerVersionError:
        raise
    except (NotAPackError, RawPayloadError) as error:
        if isinstance(error, NotAPackError) and sniff(file.read(0, SNIFF_NBYTES)) is not Kind.PTE:
            raise
        return verify_et_file(file, partial(_verify_inside, file, jobs, progress))
    except TruncatedError as error:
        return hiding_the_rest(Damage("length", file.available, error.expected_nbytes, error))
    except (FormatError, ChecksumError) as error:
        # The end of the head cannot be trusted either.
        return hiding_the_rest(Damage("head", 0, file.available, error))
    damages = []
    try:
        prove_length(head, file.available, contained=contained)
    except TruncatedError as error:
        return hiding_the_rest(Damage("length", file.available, head.pack_nbytes, error), tensors=len(head.index))
    except TrailingBytesError as error:
        damages.append(Damage("length", head.pack_nbytes, file.available, error))
    mapping = Mapping(file, head.pack_nbytes)
    report = verify_mapped(mapping, head, jobs=jobs, progress=progress)
    return replace(report, damages=(*report.damages, *damages))


def _verify_inside(
    file: FileRange, jobs: int | None, progress: Progress | None, offset: int, nbytes: int
) -> VerifyReport:
    """Verify a range of ``file``."""
    with closing(FileRange(file.path, offset=file.offset + offset, nbytes=nbytes)) as part:
        return _verify(part, jobs, progress, contained=True)


def verify_mapped(mapping: Mapping, head: Head, *, jobs: int | None, progress: Progress | None) -> VerifyReport:
    """Verify a pack whose head and length are proved.

    Raises: OptionError, LimitError for ``jobs``; NewerVersionError for the footer; StateError when another thread
    closes the pack.
    """
    check_number("jobs", jobs, least=1, optional=True)
    damages = [
        *_tail_damages(mapping, head),
        *_graph_damages(mapping, head),
        *_order_damages(head),
        *_cover_damages(head),
        *_padding_damages(mapping, head),
        *_block_damages(mapping, head, jobs or cores(), progress),
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


def _graph_damages(mapping: Mapping, head: Head) -> Iterator[Damage]:
    """The graph describes every tensor as the index does."""
    begin, end = head.kind.graph_file_offset, head.graph_end
    if begin == end:
        yield Damage("graph", begin, end, FormatError(f"no graph before the index at byte {end}"))
        return
    index = head.index
    try:
        data = memoryview(mapping.array(begin, end - begin))
        rows = np.flatnonzero(head.kind.disagreements(data, index)).tolist()
    except FormatError as error:
        yield Damage("graph", begin, end, error)
        return
    if rows:
        names = tuple(index.name(row) for row in rows)
        count = counted(len(names), "tensor")
        text = f"graph (bytes {begin} to {end}) and index disagree about {count}: {listed(names)}"
        yield Damage("graph", begin, end, FormatError(text), tensors=names)


def _order_damages(head: Head) -> Iterator[Damage]:
    """Names are sorted and unique, and so are the keys of each tensor's notes."""
    index = head.index
    begin, end = head.index_file_offset, head.index_file_offset + head.index_nbytes
    names = [index.name_bytes(tensor) for tensor in index.name_order.tolist()]
    for before, after in pairwise(names):
        if before >= after:
            what = "are equal" if before == after else "are in the wrong order"
            pair = before.decode(), after.decode()
            text = f"index: the names {quoted(pair[0])} and {quoted(pair[1])} {what}"
            yield Damage("names", begin, end, FormatError(text), tensors=pair)
    keys = (index.ragged_notes.row(row).tobytes() for row in range(0, 2 * len(index.note_tensors), 2))
    notes = zip(index.note_tensors.tolist(), keys)
    for (tensor, key), (next_tensor, next_key) in pairwise(notes):
        if tensor == next_tensor and key >= next_key:
            text = f"index: the notes {quoted(key)} and {quoted(next_key)} of one tensor are not in order"
            yield Damage("notes", begin, end, FormatError(text))


def _cover_damages(head: Head) -> Iterator[Damage]:
    """Every byte of a buffer belongs to a tensor."""
    index = head.index
    held = np.flatnonzero(index.tensor_buffers != NO_BUFFER)
    rows = held[np.argsort(index.offsets[held], kind="stable")]
    begins = index.offsets[rows]
    covered = np.zeros(len(index.buffer_nbytes), np.int64)
    fresh = fresh_nbytes(begins, begins + index.tensor_nbytes[rows])
    np.add.at(covered, index.tensor_buffers[rows], fresh)
    for buffer in np.flatnonzero(covered != index.buffer_nbytes).tolist():
        begin = head.region_file_offset + int(index.buffer_offsets[buffer])
        nbytes = int(index.buffer_nbytes[buffer])
        text = f"index: only {covered[buffer]} of the {nbytes} bytes of buffer {buffer} belong to a tensor"
        yield Damage("buffers", begin, begin + nbytes, FormatError(text), buffer=buffer)


def _padding_damages(mapping: Mapping, head: Head) -> Iterator[Damage]:
    """All bytes between the parts are zero."""
    index = head.index
    index_end = head.index_file_offset + head.index_nbytes
    for begin, end in (
        head.kind.zeros,
        (head.graph_end, head.index_file_offset),
        (index_end, head.region_file_offset - head.locator_nbytes),
    ):
        yield from _filled(mapping, begin, end, "head")
    begins = np.insert(index.buffer_offsets + index.buffer_nbytes, 0, 0) + head.region_file_offset
    ends = np.append(index.buffer_offsets, head.region_nbytes) + head.region_file_offset
    gaps = ends > begins
    for begin, end in zip(begins[gaps].tolist(), ends[gaps].tolist()):
        yield from _filled(mapping, begin, end, "region")


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


def _block_damages(mapping: Mapping, head: Head, jobs: int, progress: Progress | None) -> Iterator[Damage]:
    index = head.index
    checksums = block_checksums(mapping, head)
    step = max(1, min(TASK_BLOCKS, TASK_NBYTES // index.block_nbytes))
    starts = range(0, len(checksums), step)
    ends = [min(first + step, len(checksums)) for first in starts]
    task = partial(wrong_blocks, mapping.array, head, checksums)
    total = int(index.buffer_nbytes.sum())
    users: Users | None = None
    for end, wrong in zip(ends, _in_threads(task, starts, ends, jobs)):
        for block, actual in wrong:
            users = users or Users(index)
            error = block_error(head, users, block, expected=int(checksums[block]), actual=actual)
            affected = error.tensors, error.tensor_count, error.buffer, error.block
            yield Damage("block", error.file_begin, error.file_end, error, *affected)
        if progress is not None:
            progress(_nbytes_before(index, end), total)


def _in_threads(
    task: Callable[[int, int], list[tuple[int, int]]], starts: Sequence[int], ends: Sequence[int], jobs: int
) -> Iterator[list[tuple[int, int]]]:
    """The results, in order."""
    if jobs == 1 or len(starts) == 1:
        yield from map(task, starts, ends)
        return
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(task, starts, ends)


def _nbytes_before(index: Index, block: int) -> int:
    """Bytes of all blocks before this one."""
    if 8 * block == index.checksums_nbytes:
        return int(index.buffer_nbytes.sum())
    place = index.block_range(block)
    return int(index.buffer_nbytes[: place.buffer].sum()) + place.begin


def _tail_damages(mapping: Mapping, head: Head) -> Iterator[Damage]:
    checksums = block_checksums(mapping, head).data.cast("B")
    try:
        prove_checksums(head, checksums, read_footer(mapping.file, head))
    except NewerVersionError:
        raise
    except FormatError as error:
        yield Damage("footer", head.footer_file_offset, head.pack_nbytes, error)
    except ChecksumError as error:
        yield Damage("checksums", error.file_begin, error.file_end, error)
