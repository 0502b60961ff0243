"""A program, raw payload or data file of ExecuTorch's as a source, from a file or a pipe.

Names: those of named data are their keys; a payload's constants are ``method/delegate/number``, or in a file that is
one payload just the number; the tensors of a pack that is a payload ``method/delegate/name``; a program's own constants
have the name that the program gives them, else ``constant/number`` and ``mutable/segment/number``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from stream_pack.errors import FormatError, UnsupportedCheckpointError
from stream_pack.et_files.constants import BYTES, UNKNOWN, Constants
from stream_pack.et_files.payload import ReadFile
from stream_pack.et_files.survey import Survey
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.header_kinds import KINDS
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.format.records import Footer
from stream_pack.pipeline.adapt.source import AdaptedSource
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.scatter import Scatter, read_ranges
from stream_pack.pipeline.source import Demand, Piece, Requests, Source, StreamOptions, Traits, Zeros
from stream_pack.pipeline.spool import Spool, SpoolFile
from stream_pack.sources.executorch.footers import FooterWatch, damaged_head
from stream_pack.sources.executorch.heads import HeadsInFile, HeadsInPipe, OutOfOrder
from stream_pack.sources.pack.source import PackSource
from stream_pack.sources.sets.composite import JoinedSource, Member
from stream_pack.text import listed

__all__ = ["open_et_file"]

DATA = "the constants"
NO_DTYPE = "has a dtype that a pack has no name for"
SPOOLED = (
    "the program describes some constants after others, so that they are known only at its end: all {} bytes were "
    "spooled to a temporary file"
)
TAIL_NBYTES = len(Footer.MAGIC)


def open_et_file(stream: ByteStream, survey_of: Callable[[ReadFile], Survey], *, spool: Spool | None) -> Source:
    """The constants of the file whose first byte ``stream`` is at.

    ``survey_of`` reads it.  A pipe that describes some constants only after others is spooled whole.

    Lifetime: the source owns ``stream``.
    Raises: FormatError and TruncatedError for a file that is damaged, UnsupportedCheckpointError for one without
    constants, TruncatedSourceError; LimitError when there is no spool.
    """
    with ExitStack() as stack:
        spooled: SpoolFile | None = None
        heads: HeadsInFile | HeadsInPipe
        if stream.regular_file is None:
            heads = HeadsInPipe(stream)
            survey = _forward(heads, survey_of)
            if survey is None:
                spooled = stack.enter_context(heads.spooled(spool or Spool(None)))
                os.lseek(spooled.fileno(), 0, os.SEEK_SET)  # a file is read from its current offset
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
                names = tuple(f"{payload.users[0]}/{name}" for name in pack.catalog.names)
                pack = AdaptedSource(pack, replace(pack.catalog, names=names), range(len(names)))
                members.append(Member(payload.users[0], pack, range(len(names))))
        if len(members) == 1 and not len(source.catalog):
            where = f": {survey.external} are in other files" if survey.external else ""
            raise UnsupportedCheckpointError(f"this {source.traits.kind} holds no constants{where}")
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
        self._spooled = spooled
        traits = Traits(
            "ExecuTorch program" if survey.kind == "pte" else KINDS[survey.kind].raw,
            chooses_order=stream.regular_file is not None,
            refusals=_refusals(survey.constants),
            warnings=tuple(_warnings(survey)),
            remarks=() if spooled is None else (SPOOLED.format(spooled.nbytes),),
        )
        super().__init__(_catalog(survey.constants), traits)

    def demand(self, requests: Requests, *, in_order: bool, chunk_nbytes: int) -> Demand:
        demand = super().demand(requests, in_order=in_order, chunk_nbytes=chunk_nbytes)
        return demand if self._spooled is None else replace(demand, spool_nbytes=self._spooled.nbytes)

    @property
    def verification(self) -> str:
        if not len(self.catalog):
            return "nothing but packs holds constants"
        return "the source carries no checksum"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        if self._stream.regular_file is None:
            yield from self._pass_by(requests, options.chunk_nbytes)
            return
        yield from read_ranges(self._stream, requests, begin=0, chunk_nbytes=options.chunk_nbytes, what=DATA)

    def close(self) -> None:
        self._stream.close()
        if self._spooled is not None:
            self._spooled.close()

    def _pass_by(self, requests: Requests, chunk_nbytes: int) -> Iterator[Piece]:
        scatter = Scatter(requests)
        watch = FooterWatch(payload.file_offset + payload.nbytes for payload in self._survey.payloads)
        position = 0
        for begin, head in self._heads:
            watch.advance(begin, head)
            # No request covers the skipped bytes; this was checked before.
            yield from scatter.pieces(0, Zeros(begin - position))
            for first in range(0, len(head), chunk_nbytes):
                yield from scatter.pieces(0, head[first : first + chunk_nbytes])
            position = begin + len(head)
        self._heads = []
        rest = max(0, self._survey.file_end - position)
        for chunk in self._stream.chunks(rest, chunk_nbytes=chunk_nbytes, what=DATA):
            watch.advance(position, chunk)
            position += len(chunk)
            yield from scatter.pieces(0, chunk)
        scatter.finish()
        self._read_out()

    def _read_out(self) -> None:
        """Read the rest, so that its writer can finish, and see whether it ends like a pack."""
        tail = b""
        while some := self._stream.read_some():
            tail = (tail + some)[-TAIL_NBYTES:]
        if Footer.stands_before(tail):
            raise damaged_head("the file")


def _refusals(constants: Constants) -> Mapping[int, str]:
    unknown = np.flatnonzero(constants.dtypes == UNKNOWN).tolist()
    return {**dict.fromkeys(unknown, NO_DTYPE), **constants.invalid}


def _warnings(survey: Survey) -> Iterator[str]:
    others = [payload.backend for payload in survey.payloads if payload.kind == "other"]
    if others:
        yield f"{len(others)} payloads of {listed(sorted(set(others)))} were skipped: their format is unknown"
    if survey.external:
        yield f"{survey.external} constants of the program are in other files"


def _catalog(constants: Constants) -> Catalog:
    builder = CatalogBuilder()
    invalid = constants.invalid
    columns = zip(constants.dtypes.tolist(), constants.file_offsets.tolist(), constants.nbytes.tolist())
    for row, (dtype, begin, nbytes) in enumerate(columns):
        usable = dtype != UNKNOWN and row not in invalid
        builder.add(
            constants.names[row],
            dtype if usable else BYTES,
            constants.shape(row) if usable else (nbytes,),
            storage=0,
            start=begin,
            notes=constants.notes.get(row),
        )
    return builder.build(storages_nbytes=_covered(constants))


def _covered(constants: Constants) -> int:
    """How many bytes of the file belong to constants, each counted once."""
    order = np.argsort(constants.file_offsets, kind="stable")
    begins = constants.file_offsets[order]
    return int(fresh_nbytes(begins, begins + constants.nbytes[order]).sum())
