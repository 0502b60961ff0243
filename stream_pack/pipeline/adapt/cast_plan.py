"""Casting on paper: what the catalog looks like when tensors have other dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import BITS, DTYPES
from stream_pack.format.limits import MAX_NBYTES
from stream_pack.text import quoted

__all__ = ["CastStorages", "cast_catalog", "count_casts"]


@dataclass(frozen=True, slots=True, eq=False)
class CastStorages:
    """The derived storages that casting makes, as columns: number ``first + k`` is row ``k``.

    Row ``k`` is bytes ``[begins[k], ends[k])`` of the storage ``storages[k]``, whole elements of dtype ``sources[k]``,
    each cast to dtype ``targets[k]``.
    """

    first: int
    storages: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sources: NDArray[np.uint8]
    targets: NDArray[np.uint8]


def cast_catalog(catalog: Catalog, targets: NDArray[np.uint8]) -> tuple[Catalog, CastStorages]:
    """The catalog with ``targets`` for dtypes, and what has to be cast for that: floats and float8 to floats.

    Tensors of one dtype whose ranges overlap in a storage become ranges of one derived storage, at the places that
    their elements have in it, if they get the same dtype.  So the rule for sharing bytes works on the cast ranges just
    as it does on others: equal ones are stored once, contained ones where the alignment allows it.

    Raises: LimitError when a tensor would span more than 2**62 bytes.
    """
    element_nbytes = np.maximum(np.array(BITS) // 8, 1)
    old, new = element_nbytes[catalog.dtypes], element_nbytes[targets]
    _check_lengths(catalog, catalog.nbytes // old, new)
    nbytes = np.where(targets == catalog.dtypes, catalog.nbytes, catalog.nbytes // old * new)
    cast = np.flatnonzero((targets != catalog.dtypes) & (nbytes > 0))
    clusters, made = _clusters(catalog, targets, cast, old)
    starts, storages = catalog.starts.copy(), catalog.storages.copy()
    starts[cast] = (catalog.starts[cast] - made.begins[clusters]) // old[cast] * new[cast]
    storages[cast] = made.first + clusters
    derived = dict(catalog.derived)
    rows = zip(made.storages.tolist(), made.begins.tolist(), made.ends.tolist())
    for number, origin in enumerate(rows, made.first):
        derived[number] = catalog.derived.get(origin[0], origin)
    after = replace(
        catalog,
        dtypes=targets,
        nbytes=nbytes,
        storages=storages,
        starts=starts,
        derived=derived,
        source_dtypes=catalog.dtypes,
    )
    return after, made


def count_casts(catalog: Catalog) -> dict[str, int]:
    """How many tensors were cast, by ``"float32 -> bfloat16"`` and the like."""
    if catalog.source_dtypes is None:
        return {}
    cast = catalog.source_dtypes != catalog.dtypes
    pairs = np.stack([catalog.source_dtypes[cast], catalog.dtypes[cast]], axis=1)
    kinds, counts = np.unique(pairs, axis=0, return_counts=True)
    return {
        f"{DTYPES[source].name} -> {DTYPES[target].name}": count
        for (source, target), count in zip(kinds.tolist(), counts.tolist())
    }


def _check_lengths(catalog: Catalog, elements: NDArray[np.int64], element_nbytes: NDArray[np.int64]) -> None:
    # Divided, not multiplied: the product may wrap.
    for tensor in np.flatnonzero(elements > MAX_NBYTES // element_nbytes)[:1].tolist():
        nbytes = int(elements[tensor]) * int(element_nbytes[tensor])
        raise LimitError(
            f"tensor {quoted(catalog.names[tensor])} would span {nbytes} bytes after the cast: the limit is 2**62",
            value=nbytes,
            limit=MAX_NBYTES,
        )


def _clusters(
    catalog: Catalog, targets: NDArray[np.uint8], cast: NDArray[np.intp], element_nbytes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], CastStorages]:
    """Runs of overlapping ranges, and for each tensor of ``cast`` the run it is in."""
    storages, starts = catalog.storages[cast], catalog.starts[cast]
    ends = starts + catalog.nbytes[cast]
    # Elements of a storage viewed as two dtypes may be misaligned.
    phases = starts % element_nbytes[cast]
    keys = (starts, phases, targets[cast], catalog.dtypes[cast], storages)
    order = np.lexsort(keys)
    changes = np.zeros(len(cast), bool)
    for key in keys[1:]:
        changes[1:] |= key[order][1:] != key[order][:-1]
    clusters = np.empty(len(cast), np.int64)
    firsts: list[int] = []
    reaches: list[int] = []
    columns = zip(order.tolist(), changes.tolist(), starts[order].tolist(), ends[order].tolist())
    for row, other, start, end in columns:
        if not firsts or other or start >= reaches[-1]:
            firsts.append(row)
            reaches.append(end)
        reaches[-1] = max(reaches[-1], end)
        clusters[row] = len(firsts) - 1
    taken = [int(catalog.storages.max(initial=-1)), max(catalog.derived, default=-1)]
    made = CastStorages(
        first=max(taken) + 1,
        storages=storages[firsts],
        begins=starts[firsts],
        ends=np.array(reaches, np.int64),
        sources=catalog.dtypes[cast][firsts],
        targets=targets[cast][firsts],
    )
    return clusters, made
