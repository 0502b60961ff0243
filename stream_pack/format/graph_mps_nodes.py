"""The nodes of an MPSGraph: which values they name, so that none is named that the graph does not have.

ExecuTorch's runtime looks up every id in an array without a check, so that a wrong one reads past its end.
Source: ExecuTorch 1.4.1, backends/apple/mps/serialization/schema.fbs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError
from stream_pack.format.flatbuf import Table, Tables
from stream_pack.format.limits import MAX_TENSORS

__all__ = ["NODES", "check_ids"]

NODES: tuple[tuple[str, ...], ...] = tuple(
    tuple(node.split())
    for node in """
HardTanh 0 1, ReLU 0 1 2, GELU 0 1, LeakyReLU 0 1, Softmax 0 1, LogSoftmax 0 1, Add 0 1 2, Sub 0 1 2,
Mul 0 1 2, Div 0 1 2, Fmod 0 1 2, Remainder 0 1 2, Min 0 1 2, Max 0 1 2, Pow 0 1 2, Atan2 0 1 2,
BitwiseAnd 0 1 2, BitwiseOr 0 1 2, BitwiseXor 0 1 2, Minimum 0 1 2, Exp 0 1, Exp2 0 1, Reciprocal 0 1,
Sqrt 0 1, Neg 0 1, Log 0 1, Log10 0 1, Log2 0 1, Erf 0 1, Floor 0 1, Ceil 0 1, Rsqrt 0 1, Sigmoid 0 1,
Sin 0 1, Sign 0 1, Cos 0 1, Tan 0 1, Abs 0 1, Asin 0 1, Acos 0 1, Atan 0 1, Sinh 0 1, Cosh 0 1, Tanh 0 1,
Asinh 0 1, Acosh 0 1, Atanh 0 1, BitwiseNot 0 1, Isnan 0 1, Isinf 0 1, Round 0 1, LogicalNot 0 1,
MatMul 0 1 2, Addmm 0 1 2 3, Full 0 1, FullLike 0 1, Clamp 0 1, Where 0 1 2 3, IndexSelect 0 1 3,
Embedding 0 1 2, IndexTensor 0 2 *1, IndexPut 0 3 4 *1, Scatter 0 1 3 4, Mean 0 1, Permute 0 1, View 0 1,
Expand 0 1, Cat 1 *0, Squeeze 0 1, Unsqueeze 0 1, Select 0 1, Slice 0 1, PixelShuffle 0 1,
SplitWithSizes 0 *1, Cast 0 1, Conv2D 0 1 2 3, DepthwiseConv2D 0 1 2 3, Eq 0 1 2, Ne 0 1 2, Ge 0 1 2,
Gt 0 1 2, Le 0 1 2, Lt 0 1 2, BatchNorm 0 1 2 3 4 7 8 9, LayerNorm 0 2 3 5 6 7, MaxPool2DWithIndices 0 14 15,
AvgPool2D 0 14 15, ConstantPadND 0 1, Arange 0, DequantizePerChannelGroup 0 1 2 3
""".split(",")
)
"""The members of the union MPSNodeUnion, from 1 on: the name, and the slots of its table that hold ids; ``*``: of
vectors of ids."""

NO_VALUE = -1
"""The id of an operand or result that a node may have, and does not have."""

_NODES, _VALUES, _INPUT_IDS, _OUTPUT_IDS = 1, 2, 3, 4
_I4 = np.dtype("<i4")


def check_ids(root: Table) -> None:
    """Prove that the nodes, inputs and outputs of the graph in ``root`` name values that it has.

    Vectorised.  Raises: FormatError, also when an offset points outside the flatbuffer.
    """
    _, values = root.vector_position(_VALUES, 4) or (0, 0)
    for slot, what in ((_INPUT_IDS, "inputs"), (_OUTPUT_IDS, "outputs")):
        ids = root.vector(slot, np.int32)
        wrong = ids[(ids < 0) | (ids >= values)]
        if len(wrong):
            raise FormatError(f"{root.what}'s {what} name value {int(wrong[0])}, but it has {values} values")
    nodes = root.tables(_NODES)
    kinds = nodes.scalars(0, np.dtype("u1"))
    named = list(_wrong_ids(nodes, kinds, values))
    if named:
        node, number = min(named)
        more = f", and so do {len(named) - 1} more places" if len(named) > 1 else ""
        raise FormatError(
            f"{root.what}'s node {node} (MPS{NODES[kinds[node] - 1][0]}) names value {number}, but it has {values} "
            f"values{more}: the device would read past their end; ExecuTorch does this when it has exported before in "
            "this process, or for the second delegate of a program: clear NodeVisitor._tensor_to_id before each, or "
            "export in a block of streaming_constants"
        )


def _wrong_ids(nodes: Tables, kinds: NDArray[np.uint8], values: int) -> Iterator[tuple[int, int]]:
    """(node, id) of each id that is no value's."""
    for layout in {node[1:] for node in NODES}:
        alike = [number for number, node in enumerate(NODES, start=1) if node[1:] == layout]
        rows = np.flatnonzero(np.isin(kinds, alike))
        if not len(rows):
            continue
        tables = nodes.tables(1, rows)
        for slot in layout:
            if slot.startswith("*"):
                ids = tables.vectors(int(slot[1:]), _I4, longest=MAX_TENSORS)
                places, found = ids.rows, ids.values
            else:
                found = tables.scalars(int(slot), _I4)
                places = np.arange(len(rows))
            for at in np.flatnonzero((found < NO_VALUE) | (found >= values)).tolist():
                yield int(rows[places[at]]), int(found[at])
