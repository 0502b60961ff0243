"""The plan of a conversion: what is packed where, and which memory and disk space that takes.

Forecast and conversion both begin with :func:`prepare`, so each refuses what the other would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stream_pack.errors import StrictError
from stream_pack.et_files.layouts import ORDER_NOTE
from stream_pack.format.catalog import Catalog
from stream_pack.format.head import EncodedHead, encode_head
from stream_pack.format.header_kinds import Front, verifier_tensors
from stream_pack.format.layout import Layout, Policy, plan
from stream_pack.pipeline.adapt.cast_plan import count_casts
from stream_pack.pipeline.budget import allow_memory
from stream_pack.pipeline.memory import trim_heap
from stream_pack.pipeline.source import Requests, Source
from stream_pack.text import counted, listed
from stream_pack.writer.needs import Means, Needs, needs_of
from stream_pack.writer.report import Sizes

__all__ = ["PackSettings", "Prepared", "allow_planning", "prepare", "refuse_warnings", "requests_of", "warnings_of"]

PLANNED_NBYTES = 350
"""Memory that planning and encoding take for each tensor, beside what the source holds."""

SMALL_NBYTES = 4 << 20
"""A plan that takes no more is made before it is known whether there is memory for the rest."""

NAME_COPIES = 4
"""How often encoding the head holds the characters of all names (measured with 8 and 80 MB)."""

MAX_WARNINGS = 20
"""Warnings that one message lists: more than a command has that was typed by hand."""

METADATA_COPIES = 6
"""How often it holds those of the metadata (measured in the same way)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """How a source is packed.

    ``front``: whose header the pack begins with.  ``metadata``: added to the source's own.  ``strict``: warnings are
    errors.
    """

    front: Front
    policy: Policy
    metadata: Mapping[str, str]
    strict: bool
    means: Means


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A conversion that may begin.

    ``encoded`` is the head that describes ``layout``; ``sizes`` is what a report says about both.
    """

    layout: Layout
    encoded: EncodedHead
    sizes: Sizes
    needs: Needs


def prepare(source: Source, settings: PackSettings, *, in_order: bool) -> Prepared:
    """Plan how ``source`` is packed, into a stream if ``in_order``.  Reads no tensor data.

    Raises: SourceError, LimitError, StrictError.
    """
    catalog = source.catalog
    source.refuse(range(len(catalog)))
    if settings.metadata:
        catalog = replace(catalog, metadata={**catalog.metadata, **settings.metadata})
    allow_planning(catalog, settings.means.max_memory)
    layout = plan(catalog, settings.policy)
    trim_heap()
    encoded = encode_head(layout, settings.front)
    trim_heap()
    needs = needs_of(
        source,
        requests_of(layout),
        settings.means,
        tensors=len(layout.index),
        blocks=layout.index.checksums_nbytes // 8,
        in_order=in_order,
    )
    sizes = _sizes_of(source, catalog, layout, encoded, settings.front)
    if settings.strict:
        refuse_warnings(sizes.warnings)
    return Prepared(layout, encoded, sizes, needs)


def refuse_warnings(warnings: tuple[str, ...]) -> None:
    """Raises: StrictError if there are any."""
    if warnings:
        raise StrictError(
            f"{counted(len(warnings), 'warning')}, which --strict (strict=True) makes errors: "
            f"{listed(warnings, most=MAX_WARNINGS, separator='; ', show=str)}; nothing was written",
            warnings=warnings,
        )


def allow_planning(catalog: Catalog, max_memory: int | None) -> None:
    """Raises: LimitError when planning alone would take more memory than is allowed."""
    nbytes = (
        len(catalog) * PLANNED_NBYTES
        + NAME_COPIES * catalog.names.column.values.nbytes
        + METADATA_COPIES * sum(len(key) + len(text) for key, text in catalog.metadata.items())
    )
    if nbytes > SMALL_NBYTES:  # else the budget names the least that is enough for everything
        trim_heap()
        allow_memory(nbytes, max_memory, what="the plan of the pack")


def requests_of(layout: Layout) -> Requests:
    """What ``layout`` wants of the source."""
    return Requests(layout.buffer_storages, layout.buffer_starts, layout.index.buffer_nbytes)


def _sizes_of(source: Source, catalog: Catalog, layout: Layout, encoded: EncodedHead, front: Front) -> Sizes:
    return Sizes(
        source_kind=source.traits.kind,
        tensors=len(catalog),
        tied=layout.tied,
        source_nbytes=catalog.storages_nbytes,
        target_nbytes=encoded.head.pack_nbytes,
        shared_nbytes=layout.shared_nbytes,
        unused_nbytes=layout.unused_nbytes,
        repeated_nbytes=layout.repeated_nbytes,
        padding_nbytes=layout.padding_nbytes,
        overhead_nbytes=encoded.head.pack_nbytes - layout.region_nbytes,
        cast_nbytes=layout.cast_nbytes,
        casts=count_casts(catalog),
        warnings=(*source.traits.warnings, *warnings_of(catalog, front)),
        remarks=source.traits.remarks,
    )


def warnings_of(catalog: Catalog, front: Front) -> tuple[str, ...]:
    """What the user should know about a pack of these tensors."""
    warnings = []
    if len(catalog) and not catalog.nbytes.any():
        warnings.append(
            f"no data: {'the only tensor is' if len(catalog) == 1 else f'all {len(catalog)} tensors are'} empty; ZeRO "
            "stage 3 of DeepSpeed saves a model so and keeps its weights in *_optim_states.pt: save a whole model with "
            "zero_to_fp32.py, which it puts beside them"
        )
    most = verifier_tensors(front.kind)
    if len(catalog) > most:
        warnings.append(
            f"{len(catalog)} tensors: C++ flatbuffer verifiers with default limits refuse a graph above "
            f"{most}; stream_pack itself reads it"
        )
    if front.kind.says_dim_order:
        reordered = [catalog.names[row] for row, key, _ in catalog.notes if key == ORDER_NOTE]
        if reordered:
            warnings.append(
                f"{counted(len(reordered), 'tensor')} ({listed(reordered, most=1)}) came from ExecuTorch in another "
                "dim order, and are row-major here: a program that expects that order refuses them; give it the .ptd "
                "that they came from"
            )
    return tuple(warnings)
