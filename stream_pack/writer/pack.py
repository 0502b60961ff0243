"""Writing a whole pack: plan, head, region, checksums, footer, in that order and never back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from stream_pack.format.head import EncodedHead, Head, encode_footer
from stream_pack.format.layout import Layout
from stream_pack.format.records import Footer
from stream_pack.pipeline.chunks import Chunk, Piece
from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import Spool
from stream_pack.writer.flow import Progress, flow
from stream_pack.writer.plan import PackSettings, prepare, refuse_warnings, requests_of
from stream_pack.writer.region import RegionHasher
from stream_pack.writer.report import Report
from stream_pack.writer.sink import Sink

__all__ = ["PackWriter", "write_pack"]


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
        position = 0
        for part in self._encoded.parts:
            self._sink.put(position, part)
            position += len(part)
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
    needs = prepared.needs
    spool.allot(
        memory_nbytes=needs.waiting_nbytes,
        disk_nbytes=needs.spool_nbytes,
        why=f"a {source.traits.kind} from a pipe, with strided or out-of-order tensors",
    )
    writer = PackWriter(prepared.layout, prepared.encoded, sink)
    writer.start(reserve=not source.traits.sparse)
    if settings.strict:  # now the sink has all of its own; a stream has none
        refuse_warnings(sink.warnings)
    flow(
        source,
        requests_of(prepared.layout),
        sink,
        needs.budget,
        place=writer.hash,
        spool=spool,
        progress=progress,
        total_nbytes=prepared.layout.region_nbytes,
    )
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
