"""The blocks of a pack: their checksums, and a check of each block before its first use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.head import Head
from stream_pack.format.proof import Users, block_error, prove_checksums, unreadable_block, wrong_blocks
from stream_pack.reader.file_range import FileRange, Window
from stream_pack.reader.locks import Locked
from stream_pack.reader.opening import read_footer

__all__ = ["BlockCheck", "block_checksums"]


def block_checksums(file: FileRange, head: Head, first: int, end: int) -> NDArray[np.uint64]:
    """The entries of the checksums section for the blocks ``[first, end)``, unproved; a copy."""
    return file.array(head.checksums_file_offset + 8 * first, 8 * (end - first)).view("<u8")


class BlockCheck(Locked):
    """Checks each block at most once, before its first use.

    The bytes are read from the file, where an error can be reported; what is then handed out is the mapping.
    """

    def __init__(self, file: FileRange, head: Head) -> None:
        super().__init__()
        self._checksums = block_checksums(file, head, 0, head.index.checksums_nbytes // 8)
        prove_checksums(head, (self._checksums.data.cast("B"),), read_footer(file, head))
        self._window = Window(file)
        self._head = head
        self._proved = np.zeros(len(self._checksums), bool)

    def check(self, buffer: int, begin: int, end: int) -> None:
        """Prove the bytes ``[begin, end)`` of a buffer, ``begin < end``.

        Raises: ChecksumError or ReadError, each time for the same damaged block; TruncatedError.
        """
        head, index = self._head, self._head.index
        base = index.first_block(buffer)
        first = base + begin // index.block_nbytes
        last = base + (end - 1) // index.block_nbytes
        with self._lock:
            for block in (first + np.flatnonzero(~self._proved[first : last + 1])).tolist():
                expected = int(self._checksums[block])
                for _, wrong in wrong_blocks(self._window.parts, head, (expected,), block, block + 1):
                    if isinstance(wrong, int):
                        raise block_error(head, Users(index), block, expected=expected, actual=wrong)
                    raise unreadable_block(head, Users(index), block, wrong)
                self._proved[block] = True
