"""A GGUF file as a source, from a file or a pipe: tensors of plain types as they are, quantised ones as bytes.

A block-quantised tensor becomes a ``uint8`` tensor of the same rows, each row its blocks' bytes; its notes
``gguf.type`` and ``gguf.shape`` (JSON) say what they mean.  Nothing is dequantised.  Key-values become metadata: text
as it is, everything else as JSON (with ``NaN`` and ``Infinity``, and single bytes that are no UTF-8 as ``\\udc80`` to
``\\udcff``).
"""

from __future__ import annotations

from collections.abc import Iterator

from stream_pack.catalog import Catalog, CatalogBuilder
from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.writer.bytestream import ByteStream
from stream_pack.writer.gguf_header import read_gguf_header
from stream_pack.writer.scatter import Scatter
from stream_pack.writer.source import Piece, Requests, Source, StreamOptions

__all__ = ["GgufSource"]

DATA = "the data of the tensors"


class GgufSource(Source):
    """The tensors of a GGUF file, by data offset.

    All data is one storage, and no two tensors share bytes of it.

    Lifetime: owns ``stream``, which stands at the file's first byte.
    Raises: as :func:`stream_pack.writer.gguf_header.read_gguf_header`; TruncatedSourceError and trailing bytes are
    known of a pipe only by :meth:`stream`.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._header = header = read_gguf_header(stream)
        builder = CatalogBuilder()
        for tensor in header.tensors:
            builder.add(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                storage=0,
                start=tensor.begin,
                notes=tensor.notes,
            )
        self._catalog = builder.build(storages_nbytes=header.data_nbytes, metadata=header.metadata)
        if stream.file_nbytes is not None:
            self._check_end(stream.file_nbytes)

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def kind(self) -> str:
        return "GGUF"

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
                self._stream.seek(self._header.data_begin + start)
                for chunk in self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what=DATA):
                    yield buffer, chunk
            return
        scatter = Scatter(requests)
        if self._header.data_nbytes:
            self._stream.skip(
                self._header.data_begin - self._header.end, what="the padding before the data"
            )
        for chunk in self._stream.chunks(
            self._header.data_nbytes, chunk_nbytes=chunk_nbytes, what=DATA
        ):
            yield from scatter.pieces(0, chunk)
        scatter.finish()
        following = self._stream.peek(self._header.padded_end - self._stream.position + 1)
        self._check_end(self._stream.position + len(following))

    def close(self) -> None:
        self._stream.close()

    def _check_end(self, nbytes: int) -> None:
        """``nbytes``: of the whole source, as far as it was seen."""
        expected = (
            self._header.data_begin + self._header.data_nbytes
            if self._header.data_nbytes
            else self._header.end
        )
        if nbytes < expected:
            raise TruncatedSourceError(
                f"the source has {nbytes} bytes; its GGUF header announces {expected}: {expected - nbytes} are missing",
                position=nbytes,
                missing_nbytes=expected - nbytes,
            )
        if nbytes > self._header.padded_end:
            raise UnsupportedCheckpointError(
                f"the GGUF data ends at byte {expected}, but more than its padding follows: trailing bytes, or two "
                "files joined"
            )
