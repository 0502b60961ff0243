"""A held constant as ExecuTorch's own ``FileBackedData``, from 1.5 on.  Imports ExecuTorch."""

from __future__ import annotations

from typing import BinaryIO

from executorch.exir._serialize._cord import FileBackedData

from stream_pack.executorch.export.held import Held, OnDisk
from stream_pack.executorch.export.hooks_program import StreamedCord

__all__ = ["HeldFile"]


class HeldFile(OnDisk, FileBackedData):  # type: ignore[misc]
    """``held``, for code that takes file-backed data: in a block and after it, nothing has to be replaced.

    There is nothing to close.
    """

    def __init__(self, held: Held) -> None:
        self.held = held

    def __len__(self) -> int:
        return self.held.nbytes

    def prefix(self, size: int) -> bytes:
        return self.held.read(0, min(size, self.held.nbytes))

    def sha256(self) -> bytes:
        return self.held.sha256_digest()

    def to_bytes(self) -> bytes:
        return self.held.read(0, self.held.nbytes)

    def write_to_file(self, outfile: BinaryIO) -> None:
        StreamedCord(self).write_to_file(outfile)

    def close(self) -> None:
        """Nothing: the bytes stay on disk while anything refers to them."""
