"""How ExecuTorch lays out tensors: its ScalarTypes, and dim orders, which list the dims as they follow in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stream_pack.format.dtypes import DTYPES
from stream_pack.format.ragged import Ragged

__all__ = ["BY_SCALAR_TYPE", "ORDER_NOTE", "Layouts", "row_major"]

BY_SCALAR_TYPE = {dtype.executorch: number for number, dtype in enumerate(DTYPES) if dtype.executorch is not None}
SIZES_NOTE = "executorch.sizes"
ORDER_NOTE = "executorch.dim_order"


@dataclass(frozen=True, slots=True, eq=False)
class Layouts:
    """Dims as they follow each other in memory, so that the bytes are row-major.

    By row: ``notes``, the sizes and dim order of a tensor where its order is not the usual one, as JSON; ``invalid``,
    why its dim order cannot be used.
    """

    dims: Ragged[np.int64]
    notes: Mapping[int, Mapping[str, str]]
    invalid: Mapping[int, str]


def row_major(sizes: Ragged[np.int32], orders: Ragged[np.uint8]) -> Layouts:
    """The dims of tensors of these sizes and dim orders, one row each.  An empty dim order is the usual one."""
    dims = sizes.astype(np.int64)
    notes: dict[int, Mapping[str, str]] = {}
    invalid: dict[int, str] = {}
    unusual = orders.differs(Ragged(sizes.places, sizes.ends)) & (orders.lengths > 0)
    for row in np.flatnonzero(unusual).tolist():
        order, shape = orders.row(row).tolist(), sizes.row(row).tolist()
        if sorted(order) != list(range(len(shape))):
            invalid[row] = f"has the dim order {order} for {len(shape)} dims"
            continue
        dims.row(row)[:] = [shape[dim] for dim in order]
        notes[row] = {SIZES_NOTE: json.dumps(shape), ORDER_NOTE: json.dumps(order)}
    return Layouts(dims, notes, invalid)
