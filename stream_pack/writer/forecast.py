"""What a conversion will take and give, before any tensor data is read: the plan, and what carrying it out needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stream_pack import head
from stream_pack.catalog import Catalog
from stream_pack.layout import Layout, Policy, plan
from stream_pack.limits import VERIFIER_TENSORS
from stream_pack.report import Forecast
from stream_pack.writer.budget import Budget, anonymous_nbytes, budget
from stream_pack.writer.cast_plan import count_casts
from stream_pack.writer.source import Requests, Source

__all__ = [
    "budget_for",
    "catalog_of",
    "forecast_pack",
    "requests_of",
    "spool_needed",
    "warnings_of",
]


def forecast_pack(
    source: Source,
    *,
    policy: Policy,
    metadata: Mapping[str, str],
    chunk_nbytes: int,
    jobs: int,
    max_memory: int | None,
    to_stream: bool,
) -> Forecast:
    """The plan of packing ``source``, into a stream or into a file.  Reads no tensor data.

    Raises: SourceError, LimitError, as the conversion would before its first byte.
    """
    catalog = catalog_of(source, metadata)
    layout = plan(catalog, policy)
    encoded = head.encode(layout)
    needs = budget_for(source, layout, chunk_nbytes=chunk_nbytes, jobs=jobs, max_memory=max_memory)
    return Forecast(
        source_kind=source.kind,
        tensors=len(catalog),
        tied=layout.tied,
        buffers=len(layout.buffer_storages),
        source_nbytes=catalog.storages_nbytes,
        target_nbytes=encoded.head.pack_nbytes,
        shared_nbytes=layout.shared_nbytes,
        unused_nbytes=layout.unused_nbytes,
        repeated_nbytes=layout.repeated_nbytes,
        padding_nbytes=layout.padding_nbytes,
        overhead_nbytes=encoded.head.pack_nbytes - layout.region_nbytes,
        cast_nbytes=layout.cast_nbytes,
        casts=count_casts(catalog),
        spool_nbytes=spool_needed(source, catalog, layout, in_order=to_stream),
        peak_memory_nbytes=needs.peak_nbytes,
        warnings=(*source.remarks, *warnings_of(catalog)),
    )


def catalog_of(source: Source, metadata: Mapping[str, str]) -> Catalog:
    """The source's catalog, with ``metadata`` added to its own."""
    catalog = source.catalog
    return replace(catalog, metadata={**catalog.metadata, **metadata}) if metadata else catalog


def requests_of(layout: Layout) -> Requests:
    """What ``layout`` wants of the source."""
    return Requests(layout.buffer_storages, layout.buffer_starts, layout.index.buffer_nbytes)


def budget_for(
    source: Source, layout: Layout, *, chunk_nbytes: int, jobs: int, max_memory: int | None
) -> Budget:
    """How to stream ``source`` into ``layout`` within ``max_memory``.  Raises: LimitError."""
    return budget(
        max_memory=max_memory,
        chunk_nbytes=chunk_nbytes,
        jobs=jobs,
        tensors=len(layout.index),
        blocks=layout.index.checksums_nbytes // 8,
        source_nbytes=source.held_nbytes,
        held_nbytes=anonymous_nbytes(),
    )


def spool_needed(source: Source, catalog: Catalog, layout: Layout, *, in_order: bool) -> int:
    """Temporary disk space that the conversion takes at its peak, in bytes.

    ``in_order``: the pack goes into a stream, so what a pipe brings before its turn has to wait.  A pipe is taken to
    bring one storage after the other, each from its start; one that does not will take more.
    """
    gathering = source.spool_for(requests_of(layout))
    if not in_order or source.chooses_order:
        return gathering
    return gathering + _waiting_nbytes(_arrival(catalog, layout), layout.index.buffer_nbytes)


def warnings_of(catalog: Catalog) -> tuple[str, ...]:
    """What a person should know about a pack of these tensors."""
    if len(catalog) <= VERIFIER_TENSORS:
        return ()
    warning = (
        f"{len(catalog)} tensors: C++ flatbuffer verifiers with default limits refuse a graph above "
        f"{VERIFIER_TENSORS}; stream_pack reads it all the same"
    )
    return (warning,)


def _arrival(catalog: Catalog, layout: Layout) -> NDArray[np.intp]:
    """The buffers in the order in which a pipe completes them."""
    storages, starts = layout.buffer_storages.copy(), layout.buffer_starts.copy()
    for buffer in np.flatnonzero(np.isin(storages, list(catalog.derived))).tolist():
        storages[buffer], starts[buffer], _ = catalog.derived[int(storages[buffer])]
    return np.lexsort((starts, storages))


def _waiting_nbytes(arrival: NDArray[np.intp], nbytes: NDArray[np.int64]) -> int:
    """How many bytes wait at most, when buffers come as ``arrival`` says and leave by their number."""
    lengths = nbytes.tolist()
    waiting: set[int] = set()
    turn = held = peak = 0
    for buffer in arrival.tolist():
        if buffer != turn:
            waiting.add(buffer)
            held += lengths[buffer]
            peak = max(peak, held)
            continue
        turn += 1  # it passes without a stop
        while turn in waiting:
            waiting.remove(turn)
            held -= lengths[turn]
            turn += 1
    return peak
