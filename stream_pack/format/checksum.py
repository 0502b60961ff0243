"""Checksums: XXH3-64 with seed 0 of every block of every buffer.

A block is ``block_nbytes`` of a buffer's own bytes, the last one short: one huge tensor is verified
on all cores, damage is located, and part of a tensor can be trusted without the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from stream_pack.errors import LimitError
from stream_pack.format.limits import MAX_BLOCK_NBYTES, MIN_BLOCK_NBYTES

__all__ = ["BLOCK_NBYTES", "BlockHasher", "block_counts", "check_block_nbytes", "xxh3", "xxh3_of_zeros", "zeros"]

BLOCK_NBYTES = 4 << 20
"""Default: 2 parts per million of checksums, and 250 blocks a GiB to share among cores."""

_ZEROS = bytes(1 << 20)


def check_block_nbytes(block_nbytes: int) -> int:
    """Return ``block_nbytes``.

    Raises: LimitError unless it is a power of two from 4 KiB to 1 GiB.
    """
    if not MIN_BLOCK_NBYTES <= block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes & (block_nbytes - 1):
        raise LimitError(
            f"blocks of {block_nbytes} bytes: expected a power of two from {MIN_BLOCK_NBYTES} to {MAX_BLOCK_NBYTES}",
            value=block_nbytes,
            limit=MAX_BLOCK_NBYTES,
        )
    return block_nbytes


def block_counts(buffer_nbytes: NDArray[np.int64], block_nbytes: int) -> NDArray[np.int64]:
    """How many blocks each buffer has."""
    # Not (n + block - 1) // block: that sum may pass 2**63.
    whole, rest = np.divmod(buffer_nbytes, block_nbytes)
    counts: NDArray[np.int64] = whole + (rest > 0)
    return counts


def xxh3(parts: Iterable[bytes | memoryview]) -> int:
    """The XXH3-64 of the concatenated parts."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def zeros(nbytes: int) -> Iterable[memoryview]:
    """``nbytes`` zero bytes, in parts of at most 1 MiB that share one allocation."""
    view = memoryview(_ZEROS)
    while nbytes > len(view):
        yield view
        nbytes -= len(view)
    yield view[:nbytes]


@lru_cache(maxsize=64)
def xxh3_of_zeros(nbytes: int) -> int:
    """The XXH3-64 of ``nbytes`` zero bytes."""
    return xxh3(zeros(nbytes))


class BlockHasher:
    """Hashes one buffer as its bytes go by.

    Feed it with :meth:`update` and :meth:`update_zeros`; each returns the checksums of the blocks
    that became complete. :meth:`finish` returns that of the last, short block, if there is one.
    """

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._state = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview | bytes) -> list[int]:
        """Hash ``data``, the next bytes of the buffer."""
        view = memoryview(data)
        done: list[int] = []
        while view:
            part = view[: self._block_nbytes - self._filled]
            view = view[len(part) :]
            if not self._filled and len(part) == self._block_nbytes:
                done.append(xxhash.xxh3_64_intdigest(part))
                continue
            self._state.update(part)
            self._filled += len(part)
            if self._filled == self._block_nbytes:
                done += self.finish()
        return done

    def update_zeros(self, nbytes: int) -> list[int]:
        """Hash ``nbytes`` zero bytes; whole blocks of them cost nothing."""
        head = min(nbytes, -self._filled % self._block_nbytes)
        done = [checksum for part in zeros(head) for checksum in self.update(part)]
        whole, rest = divmod(nbytes - head, self._block_nbytes)
        if whole:
            done += [xxh3_of_zeros(self._block_nbytes)] * whole
        return done + [checksum for part in zeros(rest) for checksum in self.update(part)]

    def finish(self) -> list[int]:
        """The checksum of the block begun, if any; the hasher is then as new."""
        if not self._filled:
            return []
        checksum = self._state.intdigest()
        self._state.reset()
        self._filled = 0
        return [checksum]
