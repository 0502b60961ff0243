"""What file formats have in common that keep all data in one section, each tensor a range of it."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from stream_pack.format.catalog import Catalog
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.scatter import Scatter
from stream_pack.pipeline.source import Piece, Requests, Source, StreamOptions

__all__ = ["DataSectionSource"]

DATA = "the data of the tensors"


class DataSectionSource(Source):
    """Tensors that lie in one section of ``stream``, which is storage 0; no two share bytes of it.

    A subclass reads the header, and fills the fields: ``_catalog``, and ``_data_begin`` and ``_data_nbytes``, where the
    section stands.  :meth:`_check_end_of_pipe` knows what may follow it.

    Lifetime: owns ``stream``.
    """

    _catalog: Catalog
    _data_begin: int
    _data_nbytes: int

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def chooses_order(self) -> bool:
        return self._stream.regular_file is not None

    @property
    def verification(self) -> str:
        return "the source carries no checksum"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        chunk_nbytes = options.chunk_nbytes
        if self._stream.regular_file is not None:
            places = zip(requests.starts.tolist(), requests.nbytes.tolist(), strict=True)
            for buffer, (start, nbytes) in enumerate(places):
                self._stream.seek(self._data_begin + start)
                for chunk in self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what=DATA):
                    yield buffer, chunk
            return
        scatter = Scatter(requests)
        if self._data_nbytes:
            padding = self._data_begin - self._stream.position
            self._stream.skip(padding, what="the padding before the data")
        for chunk in self._stream.chunks(self._data_nbytes, chunk_nbytes=chunk_nbytes, what=DATA):
            yield from scatter.pieces(0, chunk)
        scatter.finish()
        self._check_end_of_pipe()

    def close(self) -> None:
        self._stream.close()

    @abc.abstractmethod
    def _check_end_of_pipe(self) -> None:
        """The data has passed: look at what follows.  Raises: SourceError for what may not."""
