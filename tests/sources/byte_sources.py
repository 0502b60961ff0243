"""Bytes as a file and as a pipe, for the sources that read both."""

from __future__ import annotations

from pathlib import Path

from stream_pack.pipeline.bytestream import ByteStream

__all__ = ["Dribble", "file_stream", "pipe_stream"]


class Dribble:
    """A pipe that never gives more than ``step`` bytes, and counts what was asked of it."""

    def __init__(self, data: bytes, *, step: int = 3) -> None:
        self._data = memoryview(data)
        self._step = step
        self.taken = 0

    def read(self, nbytes: int, /) -> bytes:
        piece = self._data[self.taken : self.taken + min(nbytes, self._step)]
        self.taken += len(piece)
        return bytes(piece)


def pipe_stream(data: bytes, *, step: int = 3) -> ByteStream:
    """``data`` as a stream that cannot seek."""
    return ByteStream(Dribble(data, step=step))


def file_stream(data: bytes, folder: Path) -> ByteStream:
    """``data`` as a regular file."""
    path = folder / "source"
    path.write_bytes(data)
    return ByteStream.open_path(path)
