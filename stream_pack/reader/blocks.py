"""The blocks of a mapped pack: their checksums, and a check of each block before its first use."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.head import Head
from stream_pack.format.proof import Users, block_error, prove_checksums, wrong_blocks
from stream_pack.reader.mapping import Mapping
from stream_pack.reader.opening import read_footer

__all__ = ["BlockCheck", "block_checksums"]


def block_checksums(mapping: Mapping, head: Head) -> NDArray[np.uint64]:
    """The checksums section, one entry per block, in place and unproved."""
    nbytes = head.index.checksums_nbytes
    if not nbytes:
        return np.empty(0, np.uint64)
    return mapping.array(head.checksums_file_offset, nbytes).view("<u8")


class BlockCheck:
    """Checks each block at most once, before its first use."""

    def __init__(self, mapping: Mapping, head: Head) -> None:
        # Copied: a live array of the mapping would keep it from being closed.
        self._checksums = block_checksums(mapping, head).copy()
        prove_checksums(head, self._checksums.data.cast("B"), read_footer(mapping.file, head))
        self._head = head
        self._proved = np.zeros(len(self._checksums), bool)
        self._lock = threading.Lock()

    def check(self, mapping: Mapping, buffer: int, begin: int, end: int) -> None:
        """Prove the bytes ``[begin, end)`` of a buffer, ``begin < end``.

        Raises: ChecksumError, each time for the same damaged block.
        """
        index = self._head.index
        base = index.first_block(buffer)
        first = base + begin // index.block_nbytes
        last = base + (end - 1) // index.block_nbytes
        with self._lock:
            for block in (first + np.flatnonzero(~self._proved[first : last + 1])).tolist():
                read = mapping.array
                for _, actual in wrong_blocks(read, self._head, self._checksums, block, block + 1):
                    users, expected = Users(index), int(self._checksums[block])
                    raise block_error(self._head, users, block, expected=expected, actual=actual)
                self._proved[block] = True
