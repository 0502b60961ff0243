"""A program, raw payload or data file of ExecuTorch's as a source, from a file or a pipe.

Names: those of named data are their keys; a payload's constants are ``method/delegate/number``, or in a file that is
one payload just the number; the tensors of a pack that is a payload ``method/delegate/name``; a program's own constants
have the name that the program gives them, else ``constant/number`` and ``mutable/segment/number``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np

from stream_pack.errors import FormatError, LimitError
from stream_pack.et_files.payload import ReadFile
from stream_pack.et_files.survey import Survey
from stream_pack.format.header_kinds import KINDS
from stream_pack.format.names import Names
from stream_pack.format.records import Footer
from stream_pack.pipeline.adapt.source import AdaptedSource
from stream_pack.pipeline.arrival import one_pass
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Chunk, Piece, Zeros
from stream_pack.pipeline.places import NOWHERE, Places
from stream_pack.pipeline.scatter import Scatter, SingleBuffer
from stream_pack.pipeline.source import Demand, Requests, Source, StreamOptions, Traits
from stream_pack.pipeline.spool import Spool, SpoolFile
from stream_pack.sources.executorch.catalog import FILE, catalog_constants
from stream_pack.sources.executorch.footers import FooterWatch, damaged_head
from stream_pack.sources.executorch.heads import HeadsInFile, HeadsInPipe, OutOfOrder
from stream_pack.sources.executorch.named import NamedData
from stream_pack.sources.executorch.reordered import Waiting, gathered, groups_of
from stream_pack.sources.pack.source import PackSource
from stream_pack.sources.sets.composite import JoinedSource, Member
from stream_pack.text import listed

__all__ = ["open_et_file"]

DATA = "the constants"
SPOOLED = (
    "the program describes some constants after others, so that they are known only at its end: all {} bytes were "
    "spooled {}"
)
TAIL_NBYTES = len(Footer.MAGIC)


def open_et_file(stream: ByteStream, survey_of: Callable[[ReadFile], Survey], *, spool: Spool | None) -> Source:
    """The constants of the file whose first byte ``stream`` is at.

    ``survey_of`` reads it.  A pipe that describes some constants only after others is spooled whole.

    Lifetime: the source owns ``stream``.
    Raises: FormatError and TruncatedError for a file that is damaged, TruncatedSourceError; LimitError when that needs
    ``spool`` and it is None.
    """
    with ExitStack() as stack:
        spooled: SpoolFile | None = None
        heads: HeadsInFile | HeadsInPipe
        if stream.regular_file is None:
            heads = HeadsInPipe(stream)
            survey = _forward(heads, survey_of)
            if survey is None:
                why = "this ExecuTorch program comes through a pipe, and describes some constants after others"
                if spool is None:
                    raise LimitError(f"{why}: they are known once all of it has been read; save it to a file first")
                spooled = stack.enter_context(spool.collect(heads.whole(), why=why))
                stream.close()
                stream = ByteStream(spooled.fileno())
        if stream.regular_file is not None:
            heads = HeadsInFile(stream)
            survey = survey_of(heads)
        assert survey is not None
        if survey.fatal_fault is not None:
            raise FormatError(survey.fatal_fault.text)
        source = ExportedSource(stream, heads, survey, spooled)
        stack.pop_all()
    return _with_packs(source, stream, survey)


def _forward(heads: HeadsInPipe, survey_of: Callable[[ReadFile], Survey]) -> Survey | None:
    """The survey of a pipe; None if its constants cannot be had in the order in which they come."""
    try:
        survey = survey_of(heads)
    except OutOfOrder:
        return None
    return None if any(payload.kind == "pack" for payload in survey.payloads) else survey


def _with_packs(source: ExportedSource, stream: ByteStream, survey: Survey) -> Source:
    """``source``, with the tensors of packs that the file has inside."""
    members = [Member("constants", source, range(len(source.catalog)))]
    metadata: Mapping[str, str] = {}
    try:
        for payload in survey.payloads:
            if payload.kind == "pack":
                pack: Source = PackSource(stream.part(payload.file_offset, payload.nbytes), within=True)
                metadata = pack.catalog.metadata
                names = Names.of(f"{payload.users[0]}/{name}" for name in pack.catalog.names)
                pack = AdaptedSource(pack, replace(pack.catalog, names=names), range(len(names)))
                members.append(Member(payload.users[0], pack, range(len(names))))
        if len(members) == 1:
            return source
        return JoinedSource(members, kind=source.traits.kind, metadata=metadata if len(members) == 2 else {})
    except BaseException:
        for member in members:
            member.source.close()
        raise


class ExportedSource(Source):
    """The constants that a survey found, in its order; the file is one storage."""

    def __init__(
        self, stream: ByteStream, heads: HeadsInFile | HeadsInPipe, survey: Survey, spooled: SpoolFile | None
    ) -> None:
        self._stream = stream
        self._heads = heads.heads if isinstance(heads, HeadsInPipe) else []
        self._survey = survey
        self._file = heads if isinstance(heads, HeadsInFile) else None
        self._spooled = spooled
        self._named = NamedData(survey)
        catalogued = catalog_constants(survey.constants)
        self._recipes = catalogued.recipes
        kind = "ExecuTorch program" if survey.kind == "pte" else KINDS[survey.kind].raw
        traits = Traits(
            kind,
            chooses_order=stream.regular_file is not None,
            warnings=tuple(_warnings(survey, kind)),
            remarks=() if spooled is None else (SPOOLED.format(spooled.nbytes, spooled.place),),
        )
        super().__init__(catalogued.catalog, traits)

    def demand(self, requests: Requests, *, in_order: bool, chunk_nbytes: int) -> Demand:
        if self._file is not None:
            return Demand()
        groups = groups_of(self._recipes, requests.storages.tolist())
        spool_nbytes = max((group.end - group.begin for group in groups), default=0)
        if not in_order:
            return Demand(spool_nbytes=spool_nbytes)
        # Each gathered tensor comes at the end of its group; taken for as long in coming as the group is.
        starts, nbytes = requests.starts.copy(), requests.nbytes.copy()
        for group in groups:
            made = np.isin(requests.storages, group.storages)
            starts[made], nbytes[made] = group.begin, group.end - group.begin
        arrival = one_pass(np.zeros_like(requests.storages), starts, nbytes, {}, chunk_nbytes=chunk_nbytes)
        return Demand(spool_nbytes=spool_nbytes, arrival=arrival)

    @property
    def verification(self) -> str:
        if not len(self.catalog):
            return "nothing but packs holds constants"
        return self._named.verification

    @property
    def checksums(self) -> str:
        return self._named.checksums

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        pieces = self._pass_by(requests, options) if self._file is None else self._in_place(requests, options)
        return self._named.checked(requests, pieces)

    def _in_place(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        assert self._file is not None
        for buffer, (storage, start, nbytes) in enumerate(requests.rows()):
            if storage == FILE:
                self._stream.seek(start)
                for chunk in self._stream.chunks(nbytes, chunk_nbytes=options.chunk_nbytes, what=DATA):
                    yield buffer, chunk
            else:
                made = self._recipes[storage]
                memory = self._file.read(made.start, made.end - made.start)
                target = SingleBuffer(buffer, start, start + nbytes)
                for window in gathered(made, memory, made.start, options):
                    yield from target.pieces(storage, window)

    def places(self, requests: Requests) -> Places:
        if self._spooled is not None:
            return Places.nowhere(len(requests))
        offsets = np.where(requests.storages == FILE, self._stream.file_offset(0) + requests.starts, NOWHERE)
        return Places.within(self._stream.source_file, offsets)

    def check_unchanged(self) -> None:
        self._stream.check_unchanged()

    def close(self) -> None:
        self._stream.close()
        if self._spooled is not None:
            self._spooled.close()

    def _pass_by(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        scatter = Scatter(requests)
        groups = groups_of(self._recipes, requests.storages.tolist())
        watch = FooterWatch(payload.file_offset + payload.nbytes for payload in self._survey.payloads)
        position = 0
        with closing(Waiting(self._recipes, groups, options)) as waiting:
            for chunk in self._passing(options.chunk_nbytes):
                if not isinstance(chunk, Zeros):
                    watch.advance(position, chunk)
                yield from scatter.pieces(FILE, chunk)
                if not isinstance(chunk, Zeros):
                    for storage, made in waiting.advance(position, chunk):
                        yield from scatter.pieces(storage, made)
                position += len(chunk)
        scatter.finish()
        self._read_out()

    def _passing(self, chunk_nbytes: int) -> Iterator[Chunk]:
        """The file to its last known byte; zeros where it was skipped, which is where no request has anything."""
        position = 0
        for begin, head in self._heads:
            yield Zeros(begin - position)
            for first in range(0, len(head), chunk_nbytes):
                yield head[first : first + chunk_nbytes]
            position = begin + len(head)
        self._heads = []
        rest = max(0, self._survey.file_end - position)
        yield from self._stream.chunks(rest, chunk_nbytes=chunk_nbytes, what=DATA)

    def _read_out(self) -> None:
        """Read the rest, so that its writer can finish, and see whether it ends like a pack."""
        tail = b""
        while some := self._stream.read_some():
            tail = (tail + some)[-TAIL_NBYTES:]
        if Footer.stands_before(tail):
            raise damaged_head("the file")


def _warnings(survey: Survey, kind: str) -> Iterator[str]:
    if not len(survey.constants) and not any(payload.kind == "pack" for payload in survey.payloads):
        yield f"this {kind} holds no constants: the pack is empty"
    others = [payload.backend for payload in survey.payloads if payload.kind == "other"]
    if others:
        yield f"{len(others)} payloads of {listed(sorted(set(others)))} were skipped: their format is unknown"
    yield from (fault.text for fault in survey.faults if fault.part == "graph" and not fault.fatal)
    if survey.external:
        yield f"{survey.external} constants of the program are in other files"
