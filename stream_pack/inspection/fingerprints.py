"""What identifies the bytes of tensors: a checksum for each block, counted from the tensor's first byte.

A pack has those of most of its tensors at its end; all other bytes are read and hashed, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import SourceError, TruncatedSourceError
from stream_pack.format.catalog import Catalog
from stream_pack.format.checksum import BlockHasher
from stream_pack.format.ragged import Ragged
from stream_pack.pipeline.chunks import Piece, Zeros
from stream_pack.pipeline.source import Requests, Source, StreamOptions
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.pack.source import PackSource
from stream_pack.writer.flow import Progress
from stream_pack.writer.needs import Means, needs_of

__all__ = ["Fingerprints", "fingerprints", "options_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprints:
    """Of tensor ``k`` of a catalog, row ``ranges[k]`` of ``checksums`` (of an empty one: -1), one for each block.

    ``read_nbytes``: the bytes that were read for them.
    """

    ranges: NDArray[np.int64]
    checksums: Ragged[np.uint64]
    read_nbytes: int

    def of(self, tensor: int) -> NDArray[np.uint64]:
        """The checksums of a tensor's blocks."""
        row = int(self.ranges[tensor])
        return np.empty(0, np.uint64) if row < 0 else self.checksums.row(row)


def fingerprints(
    source: Source, pack: PackSource | None, means: Means, *, block_nbytes: int, spool: Spool, progress: Progress | None
) -> Fingerprints:
    """Of the tensors that ``source`` has; ``pack``: what it takes them from, if that is a pack in a regular file.

    Memory: some chunks, and 8 bytes for each block.
    Raises: SourceError and its kinds; LimitError; OSError.
    """
    catalog = source.catalog
    ranges, requests = _distinct(catalog)
    known: list[NDArray[np.uint64] | None] = [None] * len(requests)
    if pack is not None and pack.head.index.block_nbytes == block_nbytes:
        known = list(_stored(pack, requests))
    unknown = np.array([row for row, checksums in enumerate(known) if checksums is None], np.int64)
    asked = Requests(requests.storages[unknown], requests.starts[unknown], requests.nbytes[unknown])
    if len(asked):
        options = options_of(source, asked, means, spool=spool, in_order=False)
        hashed = _hashed(source.stream(asked, options), asked, block_nbytes, progress)
        for row, checksums in zip(unknown.tolist(), hashed, strict=True):
            known[row] = checksums
    source.check_unchanged()
    found = [checksums for checksums in known if checksums is not None]
    values = np.concatenate([np.empty(0, np.uint64), *found])
    return Fingerprints(ranges, Ragged.of(values, list(map(len, found))), int(asked.nbytes.sum()))


def options_of(source: Source, requests: Requests, means: Means, *, spool: Spool, in_order: bool) -> StreamOptions:
    """How ``requests`` are streamed within ``means``; announces what has to wait on disk.

    Raises: LimitError.
    """
    needs = needs_of(source, requests, means, tensors=len(source.catalog), blocks=0, in_order=in_order)
    why = f"a {source.traits.kind} from a pipe, with strided or out-of-order tensors"
    spool.allot(memory_nbytes=needs.waiting_nbytes, disk_nbytes=needs.spool_nbytes, why=why)
    limits = needs.budget
    return StreamOptions(
        chunk_nbytes=limits.chunk_nbytes,
        jobs=limits.jobs,
        in_order=in_order,
        spool=spool,
        window_nbytes=limits.window_nbytes,
    )


def _distinct(catalog: Catalog) -> tuple[NDArray[np.int64], Requests]:
    """The byte ranges that tensors have, each once, and which of them each tensor has."""
    held = np.flatnonzero(catalog.nbytes)
    columns = np.stack([catalog.storages[held], catalog.starts[held], catalog.nbytes[held]])
    unique, inverse = np.unique(columns, axis=1, return_inverse=True)
    ranges = np.full(len(catalog), -1, np.int64)
    ranges[held] = inverse.reshape(-1)
    return ranges, Requests(*(np.ascontiguousarray(column) for column in unique))


def _stored(pack: PackSource, requests: Requests) -> Iterator[NDArray[np.uint64] | None]:
    """What the pack has of each range that is a whole buffer; None for others, whose blocks begin elsewhere."""
    index = pack.head.index
    checksums = pack.block_checksums()
    for buffer, start, nbytes in requests.rows():
        if start or nbytes != index.buffer_nbytes[buffer]:
            yield None
            continue
        first = index.first_block(buffer)
        yield checksums[first : first + int(index.block_counts[buffer])]


def _hashed(
    pieces: Iterator[Piece], requests: Requests, block_nbytes: int, progress: Progress | None
) -> Iterator[NDArray[np.uint64]]:
    """The checksums of each request's blocks."""
    hashers: dict[int, BlockHasher] = {}
    filled = np.zeros(len(requests), np.int64)
    found: list[list[int]] = [[] for _ in range(len(requests))]
    done, total = 0, int(requests.nbytes.sum())
    for buffer, chunk in pieces:
        hasher = hashers.setdefault(buffer, BlockHasher(block_nbytes))
        found[buffer] += hasher.update_zeros(chunk.nbytes) if isinstance(chunk, Zeros) else hasher.update(chunk)
        filled[buffer] += len(chunk)
        done += len(chunk)
        if filled[buffer] >= requests.nbytes[buffer]:
            found[buffer] += hashers.pop(buffer).finish()
        if progress is not None:
            progress(done, total)
    wrong = np.flatnonzero(filled != requests.nbytes)
    if len(wrong):
        buffer = int(wrong[0])
        error = TruncatedSourceError if filled[buffer] < requests.nbytes[buffer] else SourceError
        raise error(f"the source delivered {filled[buffer]} of {requests.nbytes[buffer]} bytes of a tensor")
    for checksums in found:
        yield np.array(checksums, np.uint64)
