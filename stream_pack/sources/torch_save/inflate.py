"""Deflated bytes in the middle of a stream: they tell themselves where they end."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from stream_pack.errors import SourceError, TruncatedSourceError
from stream_pack.pipeline.bytestream import ByteStream

__all__ = ["Inflated"]


class Inflated:
    """What a raw deflate stream that begins at the next byte of ``stream`` expands to.

    Memory: the length of two pieces, whatever the bytes expand to.  ``packed_nbytes``: compressed bytes consumed so
    far; after the end, ``stream`` is after the last of them.
    """

    def __init__(self, stream: ByteStream, *, what: str) -> None:
        self._stream = stream
        self._what = what
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._packed = b""
        self.packed_nbytes = 0

    def read(self, nbytes: int) -> bytes:
        """At least one and at most ``nbytes`` of the next bytes; empty only at the end.

        Raises: SourceError when these are no deflated bytes; TruncatedSourceError; OSError.
        """
        while not self._inflate.eof:
            if not self._packed:
                self._packed = self._stream.read_some()
                if not self._packed:
                    raise TruncatedSourceError(
                        f"the source ends inside {self._what}, before the end of its compressed bytes"
                    )
            before = len(self._packed)
            try:
                data = self._inflate.decompress(self._packed, nbytes)
            except zlib.error as error:
                raise SourceError(f"the compressed bytes of {self._what} are damaged: {error}") from None
            if self._inflate.eof:
                self._packed = self._inflate.unused_data
                self._stream.unread(self._packed)
            else:
                self._packed = self._inflate.unconsumed_tail
            self.packed_nbytes += before - len(self._packed)
            if data:
                return data
        return b""

    def _read_exactly(self, nbytes: int) -> bytes:
        """``nbytes`` bytes, fewer only at the end."""
        pieces = []
        while nbytes and (data := self.read(nbytes)):
            pieces.append(data)
            nbytes -= len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def chunks(self, nbytes: int | None, *, chunk_nbytes: int) -> Iterator[bytes]:
        """Everything, which must have ``nbytes`` bytes if that is given, in pieces of ``chunk_nbytes``, the last one
        short.

        Raises: SourceError when it has more or fewer; as :meth:`read`.
        """
        passed = 0
        while data := self._read_exactly(chunk_nbytes):
            passed += len(data)
            if nbytes is not None and passed > nbytes:
                raise SourceError(f"{self._what} expands to more than the expected {nbytes} bytes")
            yield data
        if nbytes is not None and passed < nbytes:
            raise SourceError(f"{self._what} expands to {passed} bytes; {nbytes} were expected")
