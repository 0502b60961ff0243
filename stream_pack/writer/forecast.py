"""What a conversion will take and give, before any tensor data is read: the plan, and what carrying it out needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from stream_pack.et_files.layouts import ORDER_NOTE
from stream_pack.format.catalog import Catalog
from stream_pack.format.front import Front, verifier_tensors
from stream_pack.format.head import EncodedHead, encode_head
from stream_pack.format.layout import Layout, Policy, plan
from stream_pack.pipeline.adapt.cast_plan import count_casts
from stream_pack.pipeline.arrival import waiting_nbytes
from stream_pack.pipeline.budget import Budget, allow_memory, anonymous_nbytes, budget, give_back
from stream_pack.pipeline.source import Requests, Source
from stream_pack.report import Forecast, Sizes

__all__ = [
    "Prepared",
    "forecast_pack",
    "prepare",
    "requests_of",
    "sizes_of",
    "spool_needed",
    "warnings_of",
]

PLANNED_NBYTES = 500
"""What planning and encoding take for each tensor beside what the source holds."""

SMALL_NBYTES = 4 << 20
"""A plan so small may be made before it is known whether there is memory for the rest."""

NAME_COPIES = 4
METADATA_COPIES = 6
"""Lengths of all names, and of the metadata, that encoding the head takes (measured with 8 and 80 MB)."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A conversion that may begin: what is packed where, the head that says so, and what it takes."""

    catalog: Catalog
    layout: Layout
    encoded: EncodedHead
    budget: Budget
    spool_nbytes: int


def prepare(
    source: Source,
    *,
    front: Front,
    policy: Policy,
    metadata: Mapping[str, str],
    chunk_nbytes: int,
    jobs: int,
    max_memory: int | None,
    in_order: bool,
) -> Prepared:
    """Plan all of packing ``source``, into a stream if ``in_order``.  Reads no tensor data.

    Foretelling and converting both begin here, so that the one refuses what the other would.

    Raises: SourceError, LimitError.
    """
    catalog = _catalog_of(source, metadata)
    source.refuse(range(len(catalog)))
    planning = (
        len(catalog) * PLANNED_NBYTES
        + NAME_COPIES * sum(map(len, catalog.names))
        + METADATA_COPIES * sum(len(key) + len(text) for key, text in catalog.metadata.items())
    )
    if (
        planning > SMALL_NBYTES
    ):  # else the budget below tells the least that is enough for everything
        give_back()
        allow_memory(planning, max_memory, what="the plan of the pack")
    layout = plan(catalog, policy)
    encoded = encode_head(layout, front)
    give_back()
    needs = budget(
        max_memory=max_memory,
        chunk_nbytes=chunk_nbytes,
        jobs=jobs,
        tensors=len(layout.index),
        blocks=layout.index.checksums_nbytes // 8,
        source_nbytes=source.traits.held_nbytes,
        held_nbytes=anonymous_nbytes(),
    )
    # Under a limit the chunks depend on what this very process holds, so nothing is made of their length.
    unit = chunk_nbytes if max_memory is None else 1
    spool_nbytes = spool_needed(source, layout, chunk_nbytes=unit, in_order=in_order)
    return Prepared(catalog, layout, encoded, needs, spool_nbytes)


def forecast_pack(
    source: Source,
    *,
    front: Front,
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
    prepared = prepare(
        source,
        front=front,
        policy=policy,
        metadata=metadata,
        chunk_nbytes=chunk_nbytes,
        jobs=jobs,
        max_memory=max_memory,
        in_order=to_stream,
    )
    return Forecast(
        **asdict(sizes_of(source, prepared, front)),
        buffers=len(prepared.layout.buffer_storages),
        spool_nbytes=prepared.spool_nbytes,
        peak_memory_nbytes=prepared.budget.peak_nbytes,
    )


def sizes_of(source: Source, prepared: Prepared, front: Front) -> Sizes:
    """What a report or forecast of a conversion says of its plan."""
    catalog, layout, pack = prepared.catalog, prepared.layout, prepared.encoded.head
    return Sizes(
        source_kind=source.traits.kind,
        tensors=len(catalog),
        tied=layout.tied,
        source_nbytes=catalog.storages_nbytes,
        target_nbytes=pack.pack_nbytes,
        shared_nbytes=layout.shared_nbytes,
        unused_nbytes=layout.unused_nbytes,
        repeated_nbytes=layout.repeated_nbytes,
        padding_nbytes=layout.padding_nbytes,
        overhead_nbytes=pack.pack_nbytes - layout.region_nbytes,
        cast_nbytes=layout.cast_nbytes,
        casts=count_casts(catalog),
        warnings=(*source.traits.remarks, *warnings_of(catalog, front)),
    )


def _catalog_of(source: Source, metadata: Mapping[str, str]) -> Catalog:
    """The source's catalog, with ``metadata`` added to its own."""
    catalog = source.catalog
    return replace(catalog, metadata={**catalog.metadata, **metadata}) if metadata else catalog


def requests_of(layout: Layout) -> Requests:
    """What ``layout`` wants of the source."""
    return Requests(layout.buffer_storages, layout.buffer_starts, layout.index.buffer_nbytes)


def spool_needed(source: Source, layout: Layout, *, chunk_nbytes: int, in_order: bool) -> int:
    """Temporary disk space that the conversion takes at its peak, in bytes.

    ``in_order``: the pack goes into a stream, so what comes before its turn has to wait.  ``chunk_nbytes``: as for
    :meth:`stream_pack.pipeline.source.Source.demand`.  This is never too little, and 0 only where nothing waits,
    unless a pipe brings the first of its storages in the order that is expected, and a later one not.
    """
    requests = requests_of(layout)
    demand = source.demand(requests, in_order=in_order, chunk_nbytes=chunk_nbytes)
    if demand.arrival is None:
        return demand.spool_nbytes
    return demand.spool_nbytes + waiting_nbytes(demand.arrival, requests.nbytes)


def warnings_of(catalog: Catalog, front: Front) -> tuple[str, ...]:
    """What a person should know about a pack of these tensors."""
    warnings = []
    most = verifier_tensors(front.kind)
    if len(catalog) > most:
        warnings.append(
            f"{len(catalog)} tensors: C++ flatbuffer verifiers with default limits refuse a graph above "
            f"{most}; stream_pack reads it all the same"
        )
    if front.kind.says_dim_order:
        reordered = [catalog.names[row] for row, key, _ in catalog.notes if key == ORDER_NOTE]
        if reordered:
            warnings.append(
                f"{len(reordered)} tensors, the first is {reordered[0]!r}, came from ExecuTorch in another dim order, "
                "which this .ptd does not have: give the program the .ptd that they came from"
            )
    return tuple(warnings)
