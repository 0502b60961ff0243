"""The constants that a survey found, as a catalog, and how those are made whose bytes are not row-major."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stream_pack.et_files.constants import BYTES, UNKNOWN, Constants
from stream_pack.et_files.layouts import order_note, strides_of
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BITS
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.pipeline.geometry import MAX_RANK, Recipe, merged

__all__ = ["FILE", "Catalogued", "catalog_constants"]

FILE = 0
"""The number of the only storage that is not derived: the file."""
NO_DTYPE = "has a dtype that a pack has no name for"


@dataclass(frozen=True, slots=True, eq=False)
class Catalogued:
    """The catalog.  ``recipes``: of each derived storage, from the file.  ``refusals``: as of a source's traits."""

    catalog: Catalog
    recipes: Mapping[int, Recipe]
    refusals: Mapping[int, str]


def catalog_constants(constants: Constants) -> Catalogued:
    """All constants in order.  One that cannot be used is catalogued as its bytes, and refused."""
    builder = CatalogBuilder()
    unknown = np.flatnonzero(constants.dtypes == UNKNOWN).tolist()
    refusals = {**dict.fromkeys(unknown, NO_DTYPE), **constants.invalid}
    numbers: dict[Recipe, int] = {}
    columns = zip(constants.dtypes.tolist(), constants.file_offsets.tolist(), constants.nbytes.tolist())
    for row, (dtype, begin, nbytes) in enumerate(columns):
        name, shape, storage, start = constants.names[row], constants.shape(row), FILE, begin
        notes = constants.notes.get(row)
        order = constants.orders.get(row)
        if order is not None and row not in refusals:
            made = _recipe(dtype, shape, order, begin)
            if made is None:
                refusals[row] = f"has {len(shape)} dims that are not contiguous: the limit is {MAX_RANK}"
            else:
                notes = {**(notes or {}), **order_note(order)}
                if made not in numbers:
                    numbers[made] = FILE + 1 + len(numbers)
                    builder.derive(numbers[made], of=FILE, begin=made.start, end=made.end)
                storage, start = numbers[made], 0
        if row in refusals:
            dtype, shape = BYTES, (nbytes,)
        builder.add(name, dtype, shape, storage=storage, start=start, notes=notes)
    catalog = builder.build(storages_nbytes=_covered(constants))
    return Catalogued(catalog, {number: made for made, number in numbers.items()}, refusals)


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
