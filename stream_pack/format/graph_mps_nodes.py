"""The nodes of an MPSGraph: which values they name, so that none is named that the graph does not have.

ExecuTorch's runtime looks up every id in an array without a check, so that a wrong one reads past its end; it makes
inputs and constants first, then node after node.
Source: ExecuTorch 1.4.1, backends/apple/mps/serialization/schema.fbs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError
from stream_pack.format.flatbuf import Table, Tables
from stream_pack.format.limits import MAX_TENSORS

__all__ = ["NODES", "check_ids"]

NODES: tuple[tuple[str, ...], ...] = tuple(
    tuple(node.split())
    for node in """
HardTanh 0 =1, ReLU 0 =2, GELU 0 =1, LeakyReLU 0 =1, Softmax 0 =1, LogSoftmax 0 =1, Add 0 1 =2, Sub 0 1 =2,
Mul 0 1 =2, Div 0 1 =2, Fmod 0 1 =2, Remainder 0 1 =2, Min 0 1 =2, Max 0 1 =2, Pow 0 1 =2, Atan2 0 1 =2,
BitwiseAnd 0 1 =2, BitwiseOr 0 1 =2, BitwiseXor 0 1 =2, Minimum 0 1 =2, Exp 0 =1, Exp2 0 =1, Reciprocal 0 =1,
Sqrt 0 =1, Neg 0 =1, Log 0 =1, Log10 0 =1, Log2 0 =1, Erf 0 =1, Floor 0 =1, Ceil 0 =1, Rsqrt 0 =1,
Sigmoid 0 =1, Sin 0 =1, Sign 0 =1, Cos 0 =1, Tan 0 =1, Abs 0 =1, Asin 0 =1, Acos 0 =1, Atan 0 =1, Sinh 0 =1,
Cosh 0 =1, Tanh 0 =1, Asinh 0 =1, Acosh 0 =1, Atanh 0 =1, BitwiseNot 0 =1, Isnan 0 =1, Isinf 0 =1,
Round 0 =1, LogicalNot 0 =1, MatMul 0 1 =2, Addmm 0 1 2 =3, Full =1, FullLike 0 =1, Clamp 0 =1,
Where 0 1 2 =3, IndexSelect 0 =1 3, Embedding 0 1 =2, IndexTensor 0 *1 =2, IndexPut 0 *1 3 =4,
Scatter 0 =1 3 4, Mean 0 =1, Permute 0 =1, View 0 =1, Expand 0 =1, Cat *0 =1, Squeeze 0 =1, Unsqueeze 0 =1,
Select 0 =1, Slice 0 =1, PixelShuffle 0 =1, SplitWithSizes 0 =*1, Cast 0 =1, Conv2D 0 1 2 =3,
DepthwiseConv2D 0 1 2 =3, Eq 0 1 =2, Ne 0 1 =2, Ge 0 1 =2, Gt 0 1 =2, Le 0 1 =2, Lt 0 1 =2,
BatchNorm 0 1 2 3 4 =7 =8 =9, LayerNorm 0 2 3 =5 =6 =7, MaxPool2DWithIndices 0 =14 =15, AvgPool2D 0 =14 =15,
ConstantPadND 0 =1, Arange =0, DequantizePerChannelGroup 0 =1 2 3
""".split(",")
)
"""The members of the union MPSNodeUnion, from 1 on: the name, and the slots of its table that hold ids; ``=``: of
results, ``*``: vectors of ids.  Without the second operand of ReLU, and that of Full, which no node has: read as 0."""

NO_VALUE = -1
"""The id of an operand or result that a node may have, and does not have."""

_NODES, _VALUES, _INPUT_IDS, _OUTPUT_IDS, _CONSTANT_IDS = 1, 2, 3, 4, 5
_I4 = np.dtype("<i4")


def check_ids(root: Table) -> None:
    """Prove that the nodes, inputs and outputs of the graph in ``root`` name values that it has, and that are there by
    then: inputs, constants, or results of earlier nodes.

    Vectorised.  Raises: FormatError, also when an offset points outside the flatbuffer.
    """
    _, values = root.vector_position(_VALUES, 4) or (0, 0)
    given = [root.vector(slot, np.int32) for slot in (_INPUT_IDS, _OUTPUT_IDS, _CONSTANT_IDS)]
    for ids, what in zip(given, ("inputs", "outputs", "constants")):
        wrong = ids[(ids < 0) | (ids >= values)]
        if len(wrong):
            raise FormatError(f"{root.what}'s {what} name value {int(wrong[0])}, but it has {values} values")
    nodes = root.tables(_NODES)
    kinds = nodes.scalars(0, np.dtype("u1"))
    used, made = _ids(nodes, kinds)
    outside = [ids[:, (ids[1] < NO_VALUE) | (ids[1] >= values)] for ids in (used, made)]
    missing = np.hstack(outside)
    if missing.size:
        raise _wrong(root, kinds, missing, f"and the graph has {values}")
    if (kinds > len(NODES)).any():
        return  # of a later version: what these make is not known
    maker = np.full(values + 1, len(kinds), np.int32)  # the last entry is that of NO_VALUE
    np.minimum.at(maker, made[1], made[0])
    maker[given[0]] = maker[given[2]] = maker[NO_VALUE] = -1
    early = used[:, maker[used[1]] >= used[0]]
    if early.size:
        raise _wrong(root, kinds, early, "which is no input, no constant and no result of an earlier node")


def _wrong(root: Table, kinds: NDArray[np.uint8], ids: NDArray[np.int64], why: str) -> FormatError:
    """The error of the first of ``ids``: two rows, nodes and the values that they name."""
    node, value = min(zip(*ids.tolist()))
    more = f" ({ids.shape[1] - 1} more are wrong)" if ids.shape[1] > 1 else ""
    return FormatError(
        f"{root.what}'s node {node} (MPS{NODES[kinds[node] - 1][0]}) names value {value}, {why}{more}: the device "
        "would use what is not there; ExecuTorch does this when it has exported before in this process, or for the "
        "second delegate of a program: clear NodeVisitor._tensor_to_id before each, or export in a block of "
        "streaming_constants"
    )


def _ids(nodes: Tables, kinds: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of operands, and those of results: two rows each, nodes and ids."""
    found: dict[bool, list[NDArray[np.int64]]] = {False: [], True: []}
    for layout in dict.fromkeys(node[1:] for node in NODES):
        alike = [number for number, node in enumerate(NODES, start=1) if node[1:] == layout]
        rows = np.flatnonzero(np.isin(kinds, alike))
        if not len(rows):
            continue
        tables = nodes.tables(1, rows)
        for field in layout:
            slot = int(field.lstrip("=*"))
            if "*" in field:
                vectors = tables.vectors(slot, _I4, longest=MAX_TENSORS)
                pair = rows[vectors.rows], vectors.values.astype(np.int64)
            else:
                pair = rows, tables.scalars(slot, _I4).astype(np.int64)
            found["=" in field].append(np.stack(pair))
    nothing = np.zeros((2, 0), np.int64)
    return np.hstack([nothing, *found[False]]), np.hstack([nothing, *found[True]])
