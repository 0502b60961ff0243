"""A GGUF file as a source, from a file or a pipe: tensors of plain types as they are, quantised ones as bytes.

A block-quantised tensor becomes a ``uint8`` tensor of the same rows, each row its blocks' bytes; its notes
``gguf.type`` and ``gguf.shape`` (JSON) say what they mean.  Nothing is dequantised.  Key-values become metadata: text
as it is, everything else as JSON (with ``NaN`` and ``Infinity``, and single bytes that are no UTF-8 as ``\\udc80`` to
``\\udcff``).
"""

from __future__ import annotations

from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.data_section import DataSectionSource
from stream_pack.sources.gguf.header import read_gguf_header

__all__ = ["GgufSource"]


class GgufSource(DataSectionSource):
    """The tensors of a GGUF file, by data offset.

    Lifetime: owns ``stream``, positioned at the file's first byte.
    Raises: as :func:`stream_pack.sources.gguf.header.read_gguf_header`; TruncatedSourceError and trailing bytes are
    known of a pipe only by :meth:`stream`.
    """

    def __init__(self, stream: ByteStream, *, watch: MemoryWatch = UNLIMITED) -> None:
        self._header = header = read_gguf_header(stream, watch)
        builder = CatalogBuilder()
        for tensor in header.tensors:
            if tensor.unknown is not None:
                builder.refuse(tensor.name, tensor.unknown)
                continue
            builder.add(tensor.name, tensor.dtype, tensor.shape, storage=0, start=tensor.begin, notes=tensor.notes)
        super().__init__(
            stream,
            builder.build(storages_nbytes=header.data_nbytes, metadata=header.metadata),
            kind="GGUF",
            data_begin=header.data_begin,
            data_nbytes=header.data_nbytes,
        )
        if stream.file_nbytes is not None:
            self._check_end(stream.file_nbytes)

    def _check_end_of_pipe(self) -> None:
        if self._header.padded_end is None:
            while self._stream.read_some():  # so that the writer can finish
                pass
            return
        following = self._stream.peek(self._header.padded_end - self._stream.position + 1)
        self._check_end(self._stream.position + len(following))

    def _check_end(self, nbytes: int) -> None:
        """``nbytes``: of the whole source, as far as it was seen."""
        expected = self._header.data_begin + self._header.data_nbytes if self._header.data_nbytes else self._header.end
        if nbytes < expected:
            raise TruncatedSourceError(
                f"the source has {nbytes} bytes; its GGUF header announces {expected}: {expected - nbytes} are missing",
                position=nbytes,
                missing_nbytes=expected - nbytes,
            )
        if self._header.padded_end is not None and nbytes > self._header.padded_end:
            raise UnsupportedCheckpointError(
                f"the GGUF data ends at byte {expected}, but more than its padding follows: trailing bytes, or two "
                "files joined"
            )
