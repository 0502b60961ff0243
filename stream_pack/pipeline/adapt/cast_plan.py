"""Casting on paper: which tensors become which dtype, and what the catalog looks like then.

Floats of 16, 32 and 64 bits (float16, bfloat16, float32, float64) are cast into each other.  Everything else
(integers, bools, complex, float8, four-bit types) stays as it is, whatever a rule says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError, OptionError
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import BITS, BY_NAME, DTYPES
from stream_pack.format.limits import MAX_NBYTES
from stream_pack.pipeline.adapt.select import matches
from stream_pack.text import quoted

__all__ = ["CastRule", "CastStorages", "cast_catalog", "cast_rules", "count_casts"]

_ALIASES = {
    "float16": ("f16", "fp16", "half"),
    "bfloat16": ("bf16",),
    "float32": ("f32", "fp32", "float"),
    "float64": ("f64", "fp64", "double"),
}
_FLOATS = tuple(BY_NAME[name] for name in _ALIASES)
_BY_ALIAS = {alias: BY_NAME[name] for name, aliases in _ALIASES.items() for alias in (name, *aliases)}

CastRule: TypeAlias = tuple[str, int]
"""(glob over the source's names, number of the dtype that floats among them become)."""


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


def cast_rules(dtype: object) -> tuple[CastRule, ...]:
    """The rules that ``dtype`` stands for: None; a dtype for all; ``DTYPE`` or ``GLOB=DTYPE`` as text, or a sequence
    of such texts; or a mapping of globs to dtypes.

    A dtype is a name such as ``"bf16"`` or ``"float32"``, or a torch or NumPy dtype.
    Raises: OptionError.
    """
    if dtype is None:
        return ()
    if isinstance(dtype, Mapping):
        return tuple((str(pattern), _float_number(value)) for pattern, value in dtype.items())
    if isinstance(dtype, str):
        return (_parse(dtype),)
    if isinstance(dtype, (list, tuple)):
        return tuple(_parse(str(text)) for text in dtype)
    return (("*", _float_number(dtype)),)


def cast_catalog(catalog: Catalog, rules: Sequence[CastRule], names: Sequence[str]) -> tuple[Catalog, CastStorages]:
    """The catalog with the dtype of each tensor set by the first rule that matches ``names``, one a tensor.

    Tensors of one dtype whose ranges overlap in a storage become ranges of one derived storage, at the places that
    their elements have in it, if they get the same dtype.  So the rule for sharing bytes works on the cast ranges just
    as it does on others: equal ones are stored once, contained ones where the alignment allows it.

    Raises: LimitError when a tensor would span more than 2**62 bytes.
    """
    targets = _target_dtypes(catalog, rules, names)
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
    cast_catalog = replace(
        catalog,
        dtypes=targets,
        nbytes=nbytes,
        storages=storages,
        starts=starts,
        derived=derived,
        source_dtypes=catalog.dtypes,
    )
    return cast_catalog, made


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


def _parse(text: str) -> CastRule:
    pattern, equals, dtype = text.rpartition("=")
    return (pattern if equals else "*", _float_number(dtype))


def _float_number(dtype: object) -> int:
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    number = _BY_ALIAS.get(text.removeprefix("torch."))
    if number is None:
        raise OptionError(
            f"cannot cast to {quoted(text)}: expected one of {', '.join(_BY_ALIAS)} (no bits of other dtypes are "
            "changed)"
        )
    return number


def _target_dtypes(catalog: Catalog, rules: Sequence[CastRule], names: Sequence[str]) -> NDArray[np.uint8]:
    targets = catalog.dtypes.copy()
    undecided = np.isin(catalog.dtypes, _FLOATS)
    for pattern, dtype in rules:
        rows = np.flatnonzero(undecided)
        if pattern != "*":
            matching = map(matches([pattern]), (names[row] for row in rows.tolist()))
            rows = rows[np.fromiter(matching, bool, len(rows))]
        targets[rows] = dtype
        undecided[rows] = False
    return targets


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
