"""The constants that a survey found, as a catalog, and how those are made whose bytes are not row-major."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stream_pack.errors import UnsupportedTensorError
from stream_pack.et_files.constants import UNKNOWN, Constants
from stream_pack.et_files.layouts import order_note, strides_of
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BITS
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.pipeline.geometry import MAX_RANK, Recipe, merged
from stream_pack.text import quoted

__all__ = ["FILE", "Catalogued", "catalog_constants"]

FILE = 0
"""The number of the only storage that is not derived: the file."""
NO_DTYPE = "has a dtype that a pack has no name for"


@dataclass(frozen=True, slots=True, eq=False)
class Catalogued:
    """The catalog.  ``recipes``: of each derived storage, from the file."""

    catalog: Catalog
    recipes: Mapping[int, Recipe]


def catalog_constants(constants: Constants) -> Catalogued:
    """All constants in order; one that cannot be used is refused, if it is taken."""
    builder = CatalogBuilder()
    numbers: dict[Recipe, int] = {}
    columns = zip(constants.dtypes.tolist(), constants.file_offsets.tolist())
    for row, (dtype, begin) in enumerate(columns):
        name, storage, start = constants.names[row], FILE, begin
        why = constants.invalid.get(row, NO_DTYPE if dtype == UNKNOWN else None)
        if why is not None:
            builder.refuse(name, _refused(name, why))
            continue
        shape, notes = constants.shape(row), constants.notes.get(row)
        order = constants.orders.get(row)
        if order is not None:
            made = _recipe(dtype, shape, order, begin)
            if made is None:
                why = f"has {len(shape)} dims that are not contiguous: the limit is {MAX_RANK}"
                builder.refuse(name, _refused(name, why))
                continue
            notes = {**(notes or {}), **order_note(order)}
            if made not in numbers:
                numbers[made] = FILE + 1 + len(numbers)
                builder.derive(numbers[made], of=FILE, begin=made.start, end=made.end)
            storage, start = numbers[made], 0
        builder.add(name, dtype, shape, storage=storage, start=start, notes=notes)
    catalog = builder.build(storages_nbytes=_covered(constants))
    return Catalogued(catalog, {number: made for made, number in numbers.items()})


def _refused(name: str, why: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(f"tensor {quoted(name)} {why}", tensor=name)


def _recipe(dtype: int, shape: tuple[int, ...], order: tuple[int, ...], begin: int) -> Recipe | None:
    """How a tensor at file offset ``begin`` is gathered; None if NumPy cannot view it."""
    itemsize = BITS[dtype] // 8  # no type of ExecuTorch's that has a dim order is smaller than a byte
    dims, steps = merged(shape, [stride * itemsize for stride in strides_of(shape, order)], itemsize)
    if len(dims) > MAX_RANK:
        return None
    return Recipe(begin, dims, steps, itemsize, swap_nbytes=1, unit_nbytes=1, signs=b"")


def _covered(constants: Constants) -> int:
    """How many bytes of the file belong to constants, each counted once."""
    order = np.argsort(constants.file_offsets, kind="stable")
    begins = constants.file_offsets[order]
    return int(fresh_nbytes(begins, begins + constants.nbytes[order]).sum())
