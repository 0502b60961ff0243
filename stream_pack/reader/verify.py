"""Proof of a whole pack: every checksum, and every rule of the format that opening does not check.

Verification does not stop at the first damage: :class:`VerifyReport` lists all, with the bytes and tensors affected.
All is read with ``pread`` into memory that is used again: what cannot be read, or is no longer there, is damage too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from stream_pack.arguments.jobs import check_number, cores
from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    OptionError,
    RawPayloadError,
    ReadError,
    TrailingBytesError,
    TruncatedError,
)
from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, sniff
from stream_pack.format.head import Head
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.format.limits import MAX_FLATBUFFER_NBYTES
from stream_pack.format.proof import (
    START_NBYTES,
    Users,
    Wrong,
    block_error,
    prove_length,
    prove_reach,
    unreadable_block,
    wrong_blocks,
)  # fmt: skip
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.reader.blocks import block_checksums
from stream_pack.reader.damage import Damage, VerifyReport, hiding_the_rest
from stream_pack.reader.file_range import FileRange, Window
from stream_pack.reader.opening import naming, prove_tail, read_head, read_header
from stream_pack.reader.verify_et_file import verify_et_file
from stream_pack.text import counted, listed, quoted, shown

__all__ = ["Damage", "Progress", "VerifyReport", "check_how", "verify", "verify_open"]

_T = TypeVar("_T")

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes verified, bytes in total)."""

TASK_NBYTES = 32 << 20
"""What a thread verifies in one task: long compared with starting it, short compared with the whole."""
TASK_BLOCKS = 1024
PADDING_STEP_NBYTES = 1 << 16
"""Gaps are short, and what is between two of them is read for nothing."""


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
    Copies: 1 MiB a thread; the file is read, never mapped, so that a bad sector, or a cut meanwhile, is reported.
    Raises: OSError; OptionError, LimitError; NotAPackError, RawPayloadError, NewerVersionError where there is nothing
    to verify; ReadError where the head cannot be read.  Damage is reported, not raised, also bytes that cannot be read.
    """
    check_how(jobs, progress)
    began = time.perf_counter()
    with closing(FileRange(path, offset=offset, nbytes=nbytes)) as file, naming(file):
        report = _verify(file, jobs, progress, contained=offset != 0 or nbytes is not None)
        return replace(report, path=file.name, seconds=time.perf_counter() - began)


def check_how(jobs: object, progress: object) -> None:
    """Raises: OptionError, LimitError for options that mean nothing."""
    check_number("jobs", jobs, least=1, optional=True)
    if progress is not None and not callable(progress):
        raise OptionError(f"progress={shown(progress)}: expected a function of (bytes done, bytes in total)")


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
        return hiding_the_rest(Damage("length", error.actual_nbytes, error.expected_nbytes, error))
    except (FormatError, ChecksumError) as error:
        return hiding_the_rest(Damage("head", 0, _head_end(file), error))
    damages = []
    try:
        prove_length(head, file.available, contained=contained)
    except TruncatedError as error:
        return hiding_the_rest(Damage("length", file.available, head.pack_nbytes, error), tensors=len(head.index))
    except TrailingBytesError as error:
        damages.append(Damage("length", head.pack_nbytes, file.available, error))
    report = _Verification(file, head).run(jobs or cores(), progress)
    return replace(report, damages=(*report.damages, *damages))


def _verify_inside(
    file: FileRange, jobs: int | None, progress: Progress | None, offset: int, nbytes: int
) -> VerifyReport:
    """Verify a range of ``file``."""
    with closing(FileRange(file.name, offset=file.offset + offset, nbytes=nbytes)) as part:
        return _verify(part, jobs, progress, contained=True)


def _head_end(file: FileRange) -> int:
    """Where a damaged head ends, as far as its header can be believed."""
    nbytes = START_NBYTES
    try:
        header = read_header(file)
        nbytes = header.kind.header_nbytes
        prove_reach(header, file.available)
    except FormatError:
        return min(nbytes, file.available)
    return header.region_file_offset


def verify_open(file: FileRange, head: Head, *, jobs: int | None, progress: Progress | None) -> VerifyReport:
    """Verify a pack whose head and length were proved when it was opened.

    Raises: OptionError, LimitError for ``jobs``, ``progress``; NewerVersionError for the footer; StateError when
    another thread closes the pack.
    """
    check_how(jobs, progress)
    began = time.perf_counter()
    report = _Verification(file, head).run(jobs or cores(), progress)
    return replace(report, path=file.name, seconds=time.perf_counter() - began)


class _Verification:
    """One verification of one pack, and what it has found so far."""

    def __init__(self, file: FileRange, head: Head) -> None:
        self._file = file
        self._head = head
        self._index = head.index
        self._checksum: int | None = None
        self._blocks = head.index.checksums_nbytes // 8
        self._total = int(head.index.buffer_nbytes.sum())
        self._unread_blocks = self._unread_nbytes = 0
        # Memory to read into, one for each thread; whoever works takes one and puts it back.
        self._windows: list[Window] = []

    def run(self, jobs: int, progress: Progress | None) -> VerifyReport:
        """Look at everything; stop only where the file turns out to be cut."""
        damages: list[Damage] = []
        cut = False
        try:
            for damage in self._damages(jobs, progress):
                damages.append(damage)  # noqa: PERF402 - extend() may lose what came before an error
        except TruncatedError as error:
            cut = True
            damages.append(Damage("length", error.actual_nbytes, self._head.pack_nbytes, error))
        damages.sort(key=lambda damage: damage.file_begin)
        return VerifyReport(
            tensors=len(self._index),
            blocks=0 if cut else self._blocks - self._unread_blocks,
            nbytes=0 if cut else self._total - self._unread_nbytes,
            complete=not cut and not any(damage.unreadable for damage in damages),
            damages=tuple(damages),
            checksum=self._checksum,
        )

    def _damages(self, jobs: int, progress: Progress | None) -> Iterator[Damage]:
        yield from self._in_tail()
        yield from self._in_graph()
        yield from self._in_order()
        yield from self._in_cover()
        yield from self._in_padding()
        yield from self._in_blocks(jobs, progress)

    def _in_tail(self) -> Iterator[Damage]:
        head = self._head
        try:
            self._checksum = prove_tail(self._file, head).checksum
        except NewerVersionError:
            raise
        except TruncatedError:
            raise
        except FormatError as error:
            yield Damage("footer", head.footer_file_offset, head.pack_nbytes, error)
        except (ChecksumError, ReadError) as error:
            yield Damage("checksums", error.file_begin, error.file_end, error)

    def _in_graph(self) -> Iterator[Damage]:
        """The graph describes every tensor as the index does."""
        head = self._head
        begin, end = head.kind.graph_file_offset, head.graph_end
        if begin == end:
            yield Damage("graph", begin, end, FormatError(f"no graph before the index at byte {end}"))
            return
        try:
            # No flatbuffer is longer, whatever a header that was made to do harm says.
            data = self._file.array(begin, min(end - begin, MAX_FLATBUFFER_NBYTES)).data
            rows = np.flatnonzero(head.kind.disagreements(data, self._index)).tolist()
        except TruncatedError:
            raise
        except (FormatError, ReadError) as error:
            yield Damage("graph", begin, end, error)
            return
        if rows:
            names = tuple(self._index.name(row) for row in rows)
            count = counted(len(names), "tensor")
            text = f"graph (bytes {begin} to {end}) and index disagree about {count}: {listed(names)}"
            yield Damage("graph", begin, end, FormatError(text), tensors=names)

    def _in_order(self) -> Iterator[Damage]:
        """Names are sorted and unique, and so are the keys of each tensor's notes."""
        index = self._index
        begin, end = self._head.index_file_offset, self._head.index_file_offset + self._head.index_nbytes
        names = index.ordered_names()
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

    def _in_cover(self) -> Iterator[Damage]:
        """Every byte of a buffer belongs to a tensor."""
        index = self._index
        held = np.flatnonzero(index.tensor_buffers != NO_BUFFER)
        rows = held[np.argsort(index.offsets[held], kind="stable")]
        begins = index.offsets[rows]
        covered = np.zeros(len(index.buffer_nbytes), np.int64)
        fresh = fresh_nbytes(begins, begins + index.tensor_nbytes[rows])
        np.add.at(covered, index.tensor_buffers[rows], fresh)
        for buffer in np.flatnonzero(covered != index.buffer_nbytes).tolist():
            begin = self._head.region_file_offset + int(index.buffer_offsets[buffer])
            nbytes = int(index.buffer_nbytes[buffer])
            text = f"index: only {covered[buffer]} of the {nbytes} bytes of buffer {buffer} belong to a tensor"
            yield Damage("buffers", begin, begin + nbytes, FormatError(text), buffer=buffer)

    def _in_padding(self) -> Iterator[Damage]:
        """All bytes between the parts are zero."""
        head, index = self._head, self._index
        index_end = head.index_file_offset + head.index_nbytes
        window = Window(self._file, PADDING_STEP_NBYTES)
        for begin, end in (
            head.kind.zeros,
            (head.graph_end, head.index_file_offset),
            (index_end, head.region_file_offset - head.locator_nbytes),
        ):
            yield from _filled(window, begin, end, "head", end)
        begins = np.insert(index.buffer_offsets + index.buffer_nbytes, 0, 0) + head.region_file_offset
        ends = np.append(index.buffer_offsets, head.region_nbytes) + head.region_file_offset
        gaps = ends > begins
        for begin, end in zip(begins[gaps].tolist(), ends[gaps].tolist()):
            yield from _filled(window, begin, end, "region", head.checksums_file_offset)

    def _in_blocks(self, jobs: int, progress: Progress | None) -> Iterator[Damage]:
        head, index = self._head, self._index
        step = max(1, min(TASK_BLOCKS, TASK_NBYTES // index.block_nbytes))
        starts = range(0, self._blocks, step)
        ends = [min(first + step, self._blocks) for first in starts]
        users: Users | None = None
        for end, (checksums, wrong) in zip(ends, _in_threads(self._wrong_blocks, starts, ends, jobs)):
            for block, what in wrong:
                users = users or Users(index)
                if isinstance(what, int):
                    expected = checksums[block - end]
                    error: ChecksumError | ReadError = block_error(head, users, block, expected=expected, actual=what)
                else:
                    error = unreadable_block(head, users, block, what)
                    self._unread_blocks += 1
                    self._unread_nbytes += error.file_end - error.file_begin
                affected = error.tensors, error.tensor_count, error.buffer, error.block
                yield Damage("block", error.file_begin, error.file_end, error, *affected)
            if progress is not None:
                progress(_nbytes_before(index, end), self._total)

    def _wrong_blocks(self, first: int, end: int) -> tuple[list[int], list[tuple[int, Wrong]]]:
        """The checksums of the blocks ``[first, end)``, and what is wrong; in any thread."""
        window = self._windows.pop() if self._windows else Window(self._file)
        try:
            checksums = block_checksums(self._file, self._head, first, end).tolist()
        except ReadError as error:  # then nothing is known of these blocks
            return [0] * (end - first), [(block, error) for block in range(first, end)]
        wrong = wrong_blocks(window.parts, self._head, checksums, first, end)
        self._windows.append(window)
        return checksums, wrong


def _filled(window: Window, begin: int, end: int, part: str, ahead: int) -> Iterator[Damage]:
    first = last = None
    at = begin
    try:
        for step in window.parts(begin, end, ahead):
            data = np.frombuffer(step, np.uint8)
            if data.any():
                where = np.flatnonzero(data)
                first = at + int(where[0]) if first is None else first
                last = at + int(where[-1])
            at += len(data)
    except ReadError as error:
        yield Damage("padding", error.file_begin, error.file_end, error)
    if first is not None and last is not None:
        text = f"padding in the {part} (bytes {begin} to {end}) is not zero, from byte {first} to {last + 1}"
        yield Damage("padding", first, last + 1, FormatError(text))


def _in_threads(task: Callable[[int, int], _T], starts: Sequence[int], ends: Sequence[int], jobs: int) -> Iterator[_T]:
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
