"""What the kinds of sets share: opening the files of a set, and many sources that are one."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import StreamPackError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.file_state import FilesRead, FileState
from stream_pack.pipeline.places import Places
from stream_pack.pipeline.source import Demand, Requests, Source, StreamOptions, Traits
from stream_pack.text import quoted, shown

__all__ = [
    "JoinedSource",
    "Member",
    "OpenFile",
    "member_path",
    "member_remarks",
    "member_warnings",
    "open_members",
    "opened",
    "regular_file",
    "say_where",
    "together",
]

OpenFile: TypeAlias = Callable[[Path], Source]
"""How a single file is opened, whatever its kind; sets do not care which kinds there are."""

MAX_FILE_NAME_NBYTES = 255
"""Of the file systems of Linux and macOS: a longer name is no file's."""


def member_path(folder: Path, name: object, *, named_by: str) -> Path:
    """The file of a set that ``named_by``, itself a file of the set, calls ``name``.

    Only a plain name is followed, so nothing outside ``folder`` can be named; what is there may be a symbolic
    link (the hub's cache is made of them), because the owner of the folder put it there.

    Raises: UnsupportedCheckpointError for an invalid name, or one of no regular file.
    """
    if (
        type(name) is not str
        or name in (".", "..")
        or any(character in name for character in "/\\\0")
        or not 0 < _utf8_nbytes(name) <= MAX_FILE_NAME_NBYTES
    ):
        raise UnsupportedCheckpointError(
            f"{named_by} names the file {shown(name)}: expected the plain name of a file in the same folder"
        )
    try:
        return regular_file(folder / name)
    except FileNotFoundError:
        raise UnsupportedCheckpointError(
            f"{named_by} names the file {quoted(name)}, which does not exist: was the download interrupted?"
        ) from None


def regular_file(path: Path) -> Path:
    """``path``, if it may be opened: a FIFO or a device could block the reader for ever.

    Raises: UnsupportedCheckpointError for anything but a regular file; OSError.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnsupportedCheckpointError(f"{quoted(str(path))} is part of the checkpoint but not a regular file")
    return path


@contextmanager
def opened(path: Path, files: FilesRead) -> Iterator[BinaryIO]:
    """A file of a set that is read in passing, which ``files`` shall remember.

    Raises: as :func:`regular_file`; SourceChangedError where it was opened before, in another state.
    """
    with open(regular_file(path), "rb") as file:
        files.see(path, FileState.of(os.fstat(file.fileno())))
        yield file


def open_members(paths: Iterable[Path], open_file: OpenFile) -> list[Source]:
    """Every file as a source; an error says which file it is about, and closes those before it.

    Raises: as ``open_file``.
    """
    with ExitStack() as stack:
        sources = []
        for path in paths:
            try:
                sources.append(stack.enter_context(open_file(path)))
            except StreamPackError as error:
                say_where(error, quoted(path.name))
                raise
        stack.pop_all()
    return sources


def say_where(error: StreamPackError, where: str) -> None:
    """Put ``where`` before the error's message; its class and attributes stay."""
    error.args = (f"{where}: {error}",)


def together(phrases: Iterable[str], *, of: str) -> str:
    """What was verified of many (``of`` says of many what), in one phrase."""
    counts = Counter(phrases)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"of {count} {of}: {phrase}" for phrase, count in sorted(counts.items()))


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A source, its name for messages, and which rows of its catalog are wanted, in their order."""

    name: str
    source: Source
    rows: Sequence[int]


class JoinedSource(Source):
    """Tensors of several sources as one: all wanted ones of the first, then those of the second, and so on.

    Each member keeps its storages, so what is shared within a file stays shared.  ``files``: what else was read.

    Lifetime: closes the members.
    Raises: SourceError when two wanted tensors have one name.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        kind: str,
        metadata: Mapping[str, str],
        warnings: Sequence[str] = (),
        remarks: Sequence[str] = (),
        files: FilesRead | None = None,
    ) -> None:
        self._members = members
        self._files = files
        widths = [_storages(member.source.catalog) for member in members]
        self._ends = np.cumsum(np.array(widths, np.int64))
        self._begins = self._ends - np.array(widths, np.int64)
        sources = [member.source.traits for member in members]
        traits = Traits(
            kind,
            chooses_order=all(source.chooses_order for source in sources),
            held_nbytes=sum(source.held_nbytes for source in sources),
            sparse=any(source.sparse for source in sources),
            warnings=(*warnings, *member_warnings(members)),
            remarks=(*remarks, *member_remarks(members)),
        )
        super().__init__(self._build(metadata), traits)

    def demand(self, requests: Requests, *, in_order: bool, chunk_nbytes: int) -> Demand:
        begins, ends = np.empty((2, len(requests)), np.int64)
        now = spool_nbytes = 0
        for member, (buffers, part) in zip(self._members, self._parts(requests)):
            needs = member.source.demand(part, in_order=in_order, chunk_nbytes=chunk_nbytes)
            spool_nbytes = max(spool_nbytes, needs.spool_nbytes)
            if buffers:
                first, last = needs.arrival_of(len(part))
                begins[buffers], ends[buffers] = now + first, now + last
                now += int(last.max())
        in_turn = self.traits.chooses_order or not in_order
        return Demand(spool_nbytes, None if in_turn else (begins, ends))

    @property
    def verification(self) -> str:
        return together((m.source.verification for m in self._members), of="files")

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        owners = self._owners(requests)
        # A member that comes in its own order is not waited for: the writer spools.
        wait = options.in_order and self.traits.chooses_order and bool(np.any(np.diff(owners) < 0))
        if wait:
            # All members are under way at once: no threads for each.
            options = replace(options, jobs=1)
        streams = [
            self._stream_of(member, buffers, part, options)
            for member, (buffers, part) in zip(self._members, self._parts(requests))
        ]
        try:
            if wait:
                nbytes = requests.nbytes.tolist()
                for buffer, owner in enumerate(owners.tolist()):
                    yield from _one_buffer(streams[owner], buffer, nbytes[buffer])
            for stream in streams:
                yield from stream
        finally:
            for stream in streams:
                stream.close()

    @property
    def checksums(self) -> str:
        return together((m.source.checksums for m in self._members), of="files")

    def places(self, requests: Requests) -> Places:
        parts = [(buffers, m.source.places(part)) for m, (buffers, part) in zip(self._members, self._parts(requests))]
        return Places.joined(len(requests), parts)

    def check_unchanged(self) -> None:
        for member in self._members:
            member.source.check_unchanged()
        if self._files is not None:
            self._files.check_unchanged()

    def close(self) -> None:
        for member in self._members:
            member.source.close()

    def _build(self, metadata: Mapping[str, str]) -> Catalog:
        builder = CatalogBuilder()
        for base, member in zip(self._begins.tolist(), self._members):
            catalog = member.source.catalog
            notes: dict[int, dict[str, str]] = {}
            for row, key, value in catalog.notes:
                notes.setdefault(row, {})[key] = value
            for row in member.rows:
                if row in catalog.refused:
                    builder.refuse(catalog.names[row], catalog.refused[row])
                    continue
                builder.add(
                    catalog.names[row],
                    int(catalog.dtypes[row]),
                    catalog.shape(row),
                    storage=base + int(catalog.storages[row]),
                    start=int(catalog.starts[row]),
                    notes=notes.get(row),
                )
            for derived, (of, begin, end) in catalog.derived.items():
                builder.derive(base + derived, of=base + of, begin=begin, end=end)
        return builder.build(
            storages_nbytes=sum(m.source.catalog.storages_nbytes for m in self._members), metadata=metadata
        )

    def _owners(self, requests: Requests) -> NDArray[np.intp]:
        """Which member each request goes to."""
        return np.searchsorted(self._ends, requests.storages, side="right")

    def _parts(self, requests: Requests) -> Iterator[tuple[list[int], Requests]]:
        """For each member: the buffers that come from it, and what it has to be asked for."""
        owners = self._owners(requests)
        for number, begin in enumerate(self._begins.tolist()):
            buffers = np.flatnonzero(owners == number)
            storages = requests.storages[buffers] - begin
            part = Requests(storages, requests.starts[buffers], requests.nbytes[buffers])
            yield buffers.tolist(), part

    def _stream_of(
        self, member: Member, buffers: list[int], part: Requests, options: StreamOptions
    ) -> Generator[Piece, None, None]:
        """The bytes of these buffers, all from one member; nothing is read before the first is asked for."""
        stream = member.source.stream(part, options)
        try:
            for buffer, chunk in stream:
                yield buffers[buffer], chunk
        except StreamPackError as error:
            say_where(error, quoted(member.name))
            raise
        finally:
            if isinstance(stream, Generator):
                stream.close()


def member_remarks(members: Iterable[Member]) -> Iterator[str]:
    """What each member remarks, with its name."""
    return (f"{quoted(member.name)}: {line}" for member in members for line in member.source.traits.remarks)


def member_warnings(members: Iterable[Member]) -> Iterator[str]:
    """What each member warns of, with its name."""
    return (f"{quoted(member.name)}: {line}" for member in members for line in member.source.traits.warnings)


def _one_buffer(stream: Iterator[Piece], buffer: int, nbytes: int) -> Iterator[Piece]:
    while nbytes > 0:
        piece = next(stream, None)
        if piece is None:
            raise TruncatedSourceError(f"buffer {buffer} ended {nbytes} bytes early")
        nbytes -= len(piece[1])
        yield piece


def _storages(catalog: Catalog) -> int:
    """How many numbers its storages take, derived ones included."""
    return 1 + max(*catalog.derived, int(catalog.storages.max(initial=-1)), -1)


def _utf8_nbytes(text: str) -> int:
    """The length of ``text`` in UTF-8; 0 where it has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0
