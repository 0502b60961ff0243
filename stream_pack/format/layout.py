"""The plan: a pure function from the tensors there are to their places in the pack.

:func:`plan` decides which tensors share bytes, which bytes of the source are used, where every buffer is, and checks
every limit; it reads no tensor data.  Source: docs/FORMAT.md, "Tensors and buffers".
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError
from stream_pack.format.align import DEFAULT_ALIGNMENT, PAGE_NBYTES, Alignment, align_up
from stream_pack.format.catalog import Catalog
from stream_pack.format.checksum import BLOCK_NBYTES, check_block_nbytes
from stream_pack.format.dtypes import BITS, DTYPES
from stream_pack.format.index import NO_BUFFER, Index, name_columns, note_columns
from stream_pack.format.limits import MAX_NBYTES, MAX_TENSORS
from stream_pack.format.rows import rows

__all__ = ["Layout", "Policy", "plan", "refuse_blowup"]

MAX_BLOWUP = 4
BLOWUP_FLOOR_NBYTES = 1 << 20
"""Below this much output nothing counts as a blow-up: five copies of two numbers are harmless."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of the writer.

    ``allow_blowup`` permits output above four times the source bytes it is made from (expanded
    tensors, many overlapping views).  Raises: LimitError for a bad ``block_nbytes``.
    """

    alignment: Alignment = DEFAULT_ALIGNMENT
    block_nbytes: int = BLOCK_NBYTES
    allow_blowup: bool = False

    def __post_init__(self) -> None:
        check_block_nbytes(self.block_nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The place of everything.

    ``index`` and ``region_nbytes`` are what the file will say.  Buffer ``b`` of the index is filled with the bytes from
    ``buffer_starts[b]`` on of the source's storage ``buffer_storages[b]``.

    For the report, in bytes: ``tensors_nbytes``, all tensors as if each stood alone; ``shared_nbytes``, what sharing
    saves of that; ``unused_nbytes``, source bytes that no tensor has; ``repeated_nbytes``, buffers beyond the used
    source bytes (views stored apart, expanded ones written out), both counted before a cast; ``cast_nbytes``, what
    casting adds to the buffers (less than 0: takes off); ``padding_nbytes``, zeros in the region.  ``tied`` counts the
    tensors that have another tensor's bytes.
    """

    index: Index
    region_nbytes: int
    buffer_storages: NDArray[np.int64]
    buffer_starts: NDArray[np.int64]
    tied: int
    tensors_nbytes: int
    shared_nbytes: int
    unused_nbytes: int
    repeated_nbytes: int
    cast_nbytes: int
    padding_nbytes: int


def plan(catalog: Catalog, policy: Policy) -> Layout:
    """Lay out the tensors of ``catalog``.

    Raises: LimitError for too many tensors, too many bytes, or a blow-up that ``policy`` does not allow.
    """
    if len(catalog) > MAX_TENSORS:
        raise LimitError(f"{len(catalog)} tensors: the limit is {MAX_TENSORS}", value=len(catalog), limit=MAX_TENSORS)
    used = np.flatnonzero(catalog.nbytes > 0)
    hosts = np.arange(len(catalog))
    hosts[used] = used[_hosts(catalog.storages[used], catalog.starts[used], catalog.nbytes[used], policy.alignment)]
    # A buffer per host, in the order of the first tensor that uses it.
    owners, first_use = np.unique(hosts[used], return_index=True)
    owners = owners[np.argsort(first_use)]
    tensor_buffers = np.full(len(catalog), NO_BUFFER, np.uint32)
    tensor_buffers[owners] = np.arange(len(owners))
    tensor_buffers[used] = tensor_buffers[hosts[used]]
    tensor_starts = np.where(catalog.nbytes > 0, catalog.starts - catalog.starts[hosts], 0)

    buffer_nbytes = catalog.nbytes[owners]
    _check_total(buffer_nbytes, policy.alignment)
    buffer_offsets, end = _place(buffer_nbytes, policy.alignment)
    region_nbytes = align_up(end, PAGE_NBYTES)

    stored_nbytes = int(buffer_nbytes.sum())
    uncast_nbytes, used_nbytes = refuse_blowup(catalog, owners, allow_blowup=policy.allow_blowup)

    tensors_nbytes = int(catalog.nbytes.sum())
    return Layout(
        index=_index(catalog, policy, buffer_offsets, buffer_nbytes, tensor_buffers, tensor_starts),
        region_nbytes=region_nbytes,
        buffer_storages=catalog.storages[owners],
        buffer_starts=catalog.starts[owners],
        tied=len(used) - len(owners),
        tensors_nbytes=tensors_nbytes,
        shared_nbytes=tensors_nbytes - stored_nbytes,
        unused_nbytes=catalog.storages_nbytes - used_nbytes + max(0, used_nbytes - uncast_nbytes),
        repeated_nbytes=max(0, uncast_nbytes - used_nbytes),
        cast_nbytes=stored_nbytes - uncast_nbytes,
        padding_nbytes=region_nbytes - stored_nbytes,
    )


def refuse_blowup(catalog: Catalog, rows: NDArray[np.integer], *, allow_blowup: bool) -> tuple[int, int]:
    """What tensors come to if each of ``rows`` is written once, and the bytes of the source that they are made from.

    Both are counted before a cast.  Raises: LimitError if the one is far more than the other.
    """
    uncast_nbytes = _uncast_nbytes(catalog, rows)
    used_nbytes = _used_nbytes(catalog, np.flatnonzero(catalog.nbytes > 0))
    limit = MAX_BLOWUP * used_nbytes + BLOWUP_FLOOR_NBYTES
    if uncast_nbytes > limit and not allow_blowup:
        raise LimitError(
            f"{used_nbytes} bytes of the source would become {uncast_nbytes} bytes of the target, more than "
            f"{MAX_BLOWUP} times as many: the source holds expanded tensors or many overlapping views; "
            "allow it with --allow-blowup (allow_blowup=True)",
            value=uncast_nbytes,
            limit=limit,
        )
    return uncast_nbytes, used_nbytes


def _index(
    catalog: Catalog,
    policy: Policy,
    buffer_offsets: NDArray[np.int64],
    buffer_nbytes: NDArray[np.int64],
    tensor_buffers: NDArray[np.uint32],
    tensor_starts: NDArray[np.int64],
) -> Index:
    dtypes, tensor_dtypes = np.unique(catalog.dtypes, return_inverse=True)
    return Index(
        block_nbytes=policy.block_nbytes,
        alignment=policy.alignment,
        dtype_names=tuple(DTYPES[number].name for number in dtypes.tolist()),
        dtype_bits=np.array([DTYPES[number].bits for number in dtypes.tolist()], np.uint16),
        buffer_offsets=buffer_offsets,
        buffer_nbytes=buffer_nbytes,
        tensor_buffers=tensor_buffers,
        tensor_starts=tensor_starts,
        tensor_dtypes=tensor_dtypes.astype(np.uint8),
        tensor_nbytes=catalog.nbytes,
        dims_ends=catalog.dims.ends,
        dims=catalog.dims.values,
        **name_columns(catalog.names),
        **note_columns(catalog.metadata, catalog.notes),
    )


def _check_total(buffer_nbytes: NDArray[np.int64], alignment: Alignment) -> None:
    # In float64 first: the exact sum may wrap.  Every buffer may cost up to one alignment of padding.
    rough = buffer_nbytes.sum(dtype=np.float64) + alignment.large * (len(buffer_nbytes) + 1.0)
    if rough > MAX_NBYTES:
        raise LimitError(f"the tensors have about {rough:.3g} bytes: the limit of a pack is 2**62", limit=MAX_NBYTES)


def _place(nbytes: NDArray[np.int64], alignment: Alignment) -> tuple[NDArray[np.int64], int]:
    """Buffer offsets, each the first multiple of its alignment after the one before; and the last buffer's end."""
    if len(nbytes) == 0:
        return np.empty(0, np.int64), 0
    # A run begins at each large buffer.  Inside a run all offsets are multiples of the small alignment.
    large = nbytes >= alignment.large_nbytes
    run = np.cumsum(large)
    taken = np.cumsum(align_up(nbytes, alignment.small))
    before = taken - align_up(nbytes, alignment.small)
    run_first = np.flatnonzero(np.diff(run, prepend=-1))
    run_nbytes = np.diff(before[run_first], append=taken[-1])
    run_offsets = np.cumsum(align_up(run_nbytes, alignment.large))
    run_offsets -= align_up(run_nbytes, alignment.large)
    members = np.diff(run_first, append=len(nbytes))
    offsets = before + np.repeat(run_offsets - before[run_first], members)
    return offsets, int(offsets[-1] + nbytes[-1])


def _hosts(
    storages: NDArray[np.int64], starts: NDArray[np.int64], nbytes: NDArray[np.int64], alignment: Alignment
) -> NDArray[np.int64]:
    """For each range, the range whose bytes it has: itself, an equal one, or the longest that it may be inside.

    A range may be inside another if it starts there at a multiple of its own alignment.  Ties go to the first.
    Containment at such starts is transitive (a longer range has no smaller alignment), so a host is always its own
    host.
    """
    count = len(storages)
    hosts = np.arange(count)
    ends = starts + nbytes
    # By storage, then start, then longest first, then catalog order: whatever contains a range precedes it.
    order = np.lexsort((hosts, -ends, starts, storages))
    storage, start, end = storages[order], starts[order], ends[order]
    first = np.ones(count, bool)
    first[1:] = storage[1:] != storage[:-1]
    # The furthest end so far in the same storage.  Ranked, so that no arithmetic can carry from one
    # storage to the next.
    rank = np.empty(count, np.int64)
    rank[np.lexsort((end, storage))] = np.arange(count)
    furthest = np.maximum.accumulate(rank)
    overlaps = np.zeros(count, bool)
    overlaps[1:] = ~first[1:] & (start[1:] < end[np.argsort(rank)][furthest[:-1]])
    # Clusters of ranges that overlap, directly or through others; most have one member.
    cluster = np.flatnonzero(~overlaps)
    sizes = np.diff(cluster, append=count)
    for begin, size in zip(cluster[sizes > 1].tolist(), sizes[sizes > 1].tolist()):
        mates = order[begin : begin + size]
        hosts[mates] = mates[_cluster_hosts(start[begin : begin + size], end[begin : begin + size], mates, alignment)]
    return hosts


def _cluster_hosts(
    starts: NDArray[np.int64], ends: NDArray[np.int64], catalog_order: NDArray[np.int64], alignment: Alignment
) -> NDArray[np.int64]:
    """:func:`_hosts` for ranges sorted by start, then longest first, then catalog order."""
    # Equal ranges are neighbours: the first represents all.
    leads = np.ones(len(starts), bool)
    leads[1:] = (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    lead_rows = np.flatnonzero(leads)
    if len(lead_rows) == 1:
        return np.zeros(len(starts), np.int64)
    begin, end = starts[lead_rows].tolist(), ends[lead_rows].tolist()
    wanted = alignment.of(ends[lead_rows] - starts[lead_rows]).tolist()
    place = catalog_order[lead_rows].tolist()
    lead_hosts = list(range(len(lead_rows)))

    def rank(row: int) -> tuple[int, int]:
        """For sorting, the best host first: the longest, then the first in the catalog."""
        return begin[row] - end[row], place[row]

    # For each alignment and remainder, the ranges seen that may still be the best host of a later one, by start: their
    # ends ascend and they become worse, so that the best of those that reach far enough is the first.
    seen: dict[tuple[int, int], list[int]] = {}
    for row, (low, high, unit) in enumerate(zip(begin, end, wanted)):
        mates = seen.get((unit, low % unit), [])
        # All mates start at or before low; those from `reach` on end at or after high.
        reach = bisect_right(mates, high - 1, key=end.__getitem__)
        if reach < len(mates):
            lead_hosts[row] = mates[reach]
        for size in (alignment.small, alignment.large):
            chain = seen.setdefault((size, low % size), [])
            if chain and end[chain[-1]] >= high:
                continue  # that one contains this one, and so is the better host of whatever fits into both
            while chain and rank(row) < rank(chain[-1]):
                chain.pop()
            chain.append(row)
    group = np.cumsum(leads) - 1
    host_rows: NDArray[np.int64] = lead_rows[np.array(lead_hosts)[group]]
    return host_rows


def _uncast_nbytes(catalog: Catalog, owners: NDArray[np.integer]) -> int:
    """What the buffers would come to if no tensor were cast."""
    nbytes = catalog.nbytes[owners]
    if catalog.source_dtypes is not None:
        # Only floats are cast; that four-bit elements have no whole byte does not matter.
        element_nbytes = np.maximum(np.array(BITS) // 8, 1)
        old, new = catalog.source_dtypes[owners], catalog.dtypes[owners]
        nbytes = nbytes // element_nbytes[new] * element_nbytes[old]
    return int(nbytes.sum())


def _used_nbytes(catalog: Catalog, used: NDArray[np.int64]) -> int:
    """Bytes of the source's own storages that some tensor is made from, each counted once."""
    storages = catalog.storages[used].copy()
    begins = catalog.starts[used].copy()
    ends = begins + catalog.nbytes[used]
    if catalog.derived:
        known = {int(key): value for key, value in catalog.derived.items()}
        for row in np.flatnonzero(np.isin(storages, list(known))).tolist():
            storages[row], begins[row], ends[row] = known[int(storages[row])]
    order = np.lexsort((begins, storages))
    total, last, reach = 0, None, 0
    for storage, begin, end in rows(storages[order], begins[order], ends[order]):
        if storage != last:
            last, reach = storage, 0
        total += max(0, end - max(begin, reach))
        reach = max(reach, end)
    return total
