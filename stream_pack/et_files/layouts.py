"""How ExecuTorch lays out tensors: its ScalarTypes, and dim orders, which list the dims as they follow in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from stream_pack.format.dtypes import DTYPES
from stream_pack.format.ragged import Ragged

__all__ = ["BY_SCALAR_TYPE", "ORDER_NOTE", "find_orders", "order_note", "strides_of"]

BY_SCALAR_TYPE = {dtype.executorch: number for number, dtype in enumerate(DTYPES) if dtype.executorch is not None}
ORDER_NOTE = "executorch.dim_order"


def find_orders(
    sizes: Ragged[np.int32], dim_orders: Ragged[np.uint8]
) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """By row: the dim orders of tensors whose bytes are not row-major, and why a dim order cannot be used.

    A row for each tensor of these sizes; an empty dim order is row-major.
    """
    orders: dict[int, tuple[int, ...]] = {}
    invalid: dict[int, str] = {}
    unusual = dim_orders.differs(Ragged(sizes.places, sizes.ends)) & (dim_orders.lengths > 0)
    for row in np.flatnonzero(unusual).tolist():
        order, shape = dim_orders.row(row).tolist(), sizes.row(row).tolist()
        if sorted(order) != list(range(len(shape))):
            invalid[row] = f"has the dim order {order} for {len(shape)} dims"
            continue
        steps = [dim for dim in order if shape[dim] != 1]  # it does not matter where a dim of 1 is
        if 0 not in shape and steps != sorted(steps):
            orders[row] = tuple(order)
    return orders, invalid


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor whose dims follow in memory as ``order`` lists them."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def order_note(order: Sequence[int]) -> Mapping[str, str]:
    """The note of a tensor that was gathered: the dim order that the file had it in, as JSON."""
    return {ORDER_NOTE: json.dumps(list(order))}
