"""Writing a whole pack: plan, head, region, checksums, footer, in that order and never back."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from typing import TypeAlias

from stream_pack.arguments.jobs import cores
from stream_pack.errors import StreamPackError
from stream_pack.format.head import EncodedHead, Head, encode_footer
from stream_pack.format.layout import Layout
from stream_pack.format.records import Footer
from stream_pack.pipeline.budget import Budget
from stream_pack.pipeline.chunks import Chunk, Piece
from stream_pack.pipeline.overlap import overlap
from stream_pack.pipeline.source import Source, StreamOptions
from stream_pack.pipeline.spool import Spool
from stream_pack.report import Report
from stream_pack.writer.plan import PackSettings, prepare, refuse_warnings, requests_of
from stream_pack.writer.region import RegionHasher, in_turn, weight
from stream_pack.writer.sink import Sink

__all__ = ["CHUNK_NBYTES", "PackWriter", "Progress", "default_jobs", "write_pack"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes of the region written, bytes it has); the zeros of wide gaps are never counted as written."""

CHUNK_NBYTES = 1 << 20
"""Bytes moved in one step: they stay in a core's own cache between read, hash and write."""

MAX_JOBS = 4
"""Stages that can overlap: read, check the source, hash, write."""


def default_jobs() -> int:
    """Threads to use by default: one a core, up to the number of stages."""
    return min(MAX_JOBS, cores())


class PackWriter:
    """A pack being written: the head on :meth:`start`, then chunks in any order the sink allows, then :meth:`finish`.

    ``encoded`` is the head of ``layout``.  Nothing is written before :meth:`start`.
    """

    def __init__(self, layout: Layout, encoded: EncodedHead, sink: Sink) -> None:
        self.layout = layout
        self._encoded = encoded
        self._sink = sink
        self._hasher = RegionHasher(self.head)

    @property
    def head(self) -> Head:
        """What the file's head says."""
        return self._encoded.head

    def start(self, *, reserve: bool) -> None:
        """Write the head: from here on a receiver knows every tensor and its place.

        ``reserve``: fail now when the disk has no room for the whole.
        Raises: OSError (ENOSPC among others).
        """
        self._sink.begin(self.head.pack_nbytes, reserve=reserve)
        self._sink.put(0, self._encoded.front)
        locator = self._encoded.locator
        self._sink.put(self.head.region_file_offset - len(locator), locator)

    def hash(self, pieces: Iterator[Piece]) -> Iterator[tuple[int, Chunk]]:
        """Hash the pieces and say where in the file each belongs, as a stage of its own."""
        for buffer, chunk in pieces:
            yield from self._hasher.place(buffer, chunk)

    def add(self, buffer: int, chunk: Chunk) -> None:
        """Hash and write the next bytes of ``buffer``; when it returns, ``chunk`` may be written to."""
        for file_offset, part in self._hasher.place(buffer, chunk):
            self._sink.put(file_offset, part)
        self._sink.flush()

    def finish(self) -> int:
        """Write checksums and footer, commit, and return the pack's root checksum.

        Raises: TruncatedSourceError when bytes are missing.
        """
        return self.finish_with(self._hasher.finish().tobytes())

    def finish_with(self, checksums: bytes) -> int:
        """:meth:`finish` of a region that others have written and hashed: ``checksums`` are those of its blocks."""
        footer = encode_footer(self.head, checksums)
        self._sink.put(self.head.checksums_file_offset, checksums)
        self._sink.put(self.head.footer_file_offset, footer)
        self._sink.commit()
        return Footer.decode(footer)[0].checksum


def write_pack(
    source: Source, sink: Sink, settings: PackSettings, *, spool: Spool, progress: Progress | None
) -> Report:
    """Stream ``source`` into ``sink``.

    The bytes written depend on the catalog, ``front``, ``policy`` and ``metadata`` alone.
    Raises: LimitError and SourceError before a byte is written as far as the catalog shows; StrictError; SourceError,
    OSError.
    """
    began = time.perf_counter()
    prepared = prepare(source, settings, in_order=sink.in_order)
    spool.allot(
        memory_nbytes=prepared.waiting_nbytes,
        disk_nbytes=prepared.spool_nbytes,
        why=f"a {source.traits.kind} from a pipe, with strided or out-of-order tensors",
    )
    writer = PackWriter(prepared.layout, prepared.encoded, sink)
    writer.start(reserve=not source.traits.sparse)
    if settings.strict:  # now the sink has all of its own; a stream has none
        refuse_warnings(sink.warnings)
    try:
        _stream(source, writer, sink, prepared.budget, spool=spool, progress=progress)
    except StreamPackError:
        source.check_unchanged()  # a file that was changed meanwhile explains its damage
        raise
    source.check_unchanged()
    checksum = writer.finish()
    sizes = prepared.sizes
    sizes = replace(sizes, warnings=sizes.warnings + sink.warnings, remarks=sizes.remarks + sink.remarks)
    return Report(
        **asdict(sizes),
        spool_nbytes=spool.peak_nbytes,
        seconds=time.perf_counter() - began,
        checksum=checksum,
        verification=source.verification,
    )


def _stream(
    source: Source, writer: PackWriter, sink: Sink, limits: Budget, *, spool: Spool, progress: Progress | None
) -> None:
    """Read, hash and write the region, in as many threads as ``limits`` allows."""
    requests = requests_of(writer.layout)
    options = StreamOptions(
        chunk_nbytes=limits.chunk_nbytes,
        jobs=limits.jobs,
        in_order=sink.in_order,
        spool=spool,
        window_nbytes=limits.window_nbytes,
    )
    pieces = source.stream(requests, options)
    if sink.in_order:
        pieces = in_turn(pieces, requests.nbytes, spool, chunk_nbytes=limits.chunk_nbytes)
    if limits.jobs > 1:
        pieces = overlap(pieces, weigh=weight)
    hashed = writer.hash(pieces)
    if limits.jobs > 2:
        hashed = overlap(hashed, weigh=weight)
    written = 0
    try:
        for file_offset, chunk in hashed:
            sink.put(file_offset, chunk)
            written += len(chunk)
            if progress is not None:
                progress(written, writer.layout.region_nbytes)
    finally:
        # From the outermost generator in, so that every thread ends before the source is closed.
        if isinstance(hashed, Generator):
            hashed.close()
