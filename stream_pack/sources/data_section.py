"""What file formats have in common that keep all data in one section, each tensor a range of it."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from stream_pack.format.catalog import Catalog
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.places import Places
from stream_pack.pipeline.scatter import Scatter, read_ranges
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits

__all__ = ["DataSectionSource"]

DATA = "the data of the tensors"


class DataSectionSource(Source):
    """Tensors stored in one section of ``stream``, which is storage 0; no two share bytes of it.

    ``data_begin`` and ``data_nbytes``: where the section is.  :meth:`_check_end_of_pipe` knows what may follow it.

    Lifetime: owns ``stream``.
    """

    def __init__(self, stream: ByteStream, catalog: Catalog, *, kind: str, data_begin: int, data_nbytes: int) -> None:
        super().__init__(catalog, Traits(kind, chooses_order=stream.regular_file is not None))
        self._stream = stream
        self._data_begin = data_begin
        self._data_nbytes = data_nbytes

    @property
    def verification(self) -> str:
        return "the source carries no checksum"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        chunk_nbytes = options.chunk_nbytes
        if self._stream.regular_file is not None:
            yield from read_ranges(self._stream, requests, begin=self._data_begin, chunk_nbytes=chunk_nbytes, what=DATA)
            return
        scatter = Scatter(requests)
        if self._data_nbytes:
            padding = self._data_begin - self._stream.position
            self._stream.skip(padding, what="the padding before the data")
        for chunk in self._stream.chunks(self._data_nbytes, chunk_nbytes=chunk_nbytes, what=DATA):
            yield from scatter.pieces(0, chunk)
        scatter.finish()
        self._check_end_of_pipe()

    def places(self, requests: Requests) -> Places:
        begin = self._stream.file_offset(self._data_begin)
        return Places.within(self._stream.source_file, begin + requests.starts)

    def check_unchanged(self) -> None:
        self._stream.check_unchanged()

    def close(self) -> None:
        self._stream.close()

    @abc.abstractmethod
    def _check_end_of_pipe(self) -> None:
        """The data has passed: look at what follows.  Raises: SourceError for what may not."""
