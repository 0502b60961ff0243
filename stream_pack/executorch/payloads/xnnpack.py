"""Payloads of ExecuTorch's XNNPACK delegate with their constants inside, from its own graph.

ExecuTorch 1.4 and later put constants into the program's named data and refer to them by key.  Its runtime also reads
constants inside the payload; there they are aligned, and have checksums.
Source: ExecuTorch 1.5.1, backends/xnnpack: serialization/schema.fbs, and runtime/XNNCompiler.cpp for what is checked.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stream_pack.errors import SourceError
from stream_pack.executorch.payloads.constants import GraphConstant, Tensors, name_constants, write_payload
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.header_kinds import KINDS
from stream_pack.writer.flow import Progress
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.report import Report
from stream_pack.writer.sink import BinaryWriter

if TYPE_CHECKING:
    from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNGraph

__all__ = ["build_xnnpack_payload", "encode_graph"]

_KEEPS_POINTERS = "XNNPReLU"
"""The only node whose constant XNNPACK reads when it runs; it packs copies of all others when it compiles."""


def build_xnnpack_payload(
    graph: XNNGraph,
    constants: Tensors,
    target: str | os.PathLike[str] | int | BinaryWriter,
    *,
    names: Mapping[int, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    alignment: Alignment = DEFAULT_ALIGNMENT,
    block_nbytes: int = BLOCK_NBYTES,
    jobs: int | None = None,
    max_memory: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the payload of ``graph``, streaming its constants into it: a pack that the XNNPACK delegate runs.

    ``graph`` is an ``XNNGraph`` from ExecuTorch's own visitors, which is not changed.  ``constants`` has the tensor of
    each entry of its ``constant_data`` except the reserved first, by the entry's number or its ``named_key`` (then for
    all entries with that key).  Tensors are stored as given: give those packed that ExecuTorch has packed.
    ``names``: the names of constants in the pack, by number; by default their numbers.
    ``target`` and the other options: as for :func:`stream_pack.convert`.

    Copies: none of contiguous tensors on the CPU; else a chunk at a time.
    Raises: SourceError for a graph with PReLU nodes, and for constants or names that are missing or not in the graph;
    UnsupportedTensorError for a constant whose length is not the graph's; LimitError, also when graph and index take
    4 GiB or more; OSError.  A file at ``target`` is then unchanged.
    """
    options = ConvertOptions(
        metadata=metadata, alignment=alignment, block_nbytes=block_nbytes, jobs=jobs, max_memory=max_memory,
        spool_dir=spool_dir, progress=progress,
        allow_blowup=True,  # the graph fixes what each constant holds, expanded views too
    )  # fmt: skip
    _refuse_kept_pointers(graph)
    named = name_constants("constant", range(1, _entries(graph)), names)
    wanted = [_constant(graph, *constant) for constant in named]
    encode = partial(encode_graph, graph)
    return write_payload(KINDS["xnnpack"], encode, constants, wanted, target, options)


def encode_graph(graph: XNNGraph, offsets: Sequence[int], nbytes: Sequence[int]) -> bytes:
    """The flatbuffer of ``graph``, by ExecuTorch's own serializer, with its constants at the given places.

    ``offsets`` and ``nbytes``: one for each entry of ``constant_data`` except the reserved first, in bytes; offsets
    count from the region's first one.  ``graph`` is not changed; the result has no keys.
    """
    from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import ConstantDataOffset
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import convert_to_flatbuffer

    placed = copy.copy(graph)
    placed.constant_data = graph.constant_data[:1]
    for _, offset, length in zip(range(1, _entries(graph)), offsets, nbytes, strict=True):
        # Absent, not empty: the runtime looks up any key that is present, even the empty one.
        placed.constant_data.append(ConstantDataOffset(offset=offset, size=length, named_key=None))
    encoded: bytes = convert_to_flatbuffer(placed)
    return encoded


def _entries(graph: XNNGraph) -> int:
    """How many entries constant_data has, including the reserved one, which is proved to be empty."""
    first = graph.constant_data[0] if graph.constant_data else None
    if first is None or first.offset or first.size or first.named_key:
        raise SourceError(
            f"the graph's constant_data begins with {first}: expected the reserved entry, with offset and size 0"
        )
    return len(graph.constant_data)


def _constant(graph: XNNGraph, number: int, name: str, label: str) -> GraphConstant:
    entry = graph.constant_data[number]
    keys = (str(number), entry.named_key) if entry.named_key else (str(number),)
    return GraphConstant(label, keys, name, nbytes=int(entry.size))


def _refuse_kept_pointers(graph: XNNGraph) -> None:
    for place, node in enumerate(graph.xnodes):
        if type(node.xnode_union).__name__ == _KEEPS_POINTERS:
            raise SourceError(
                f"node {place} of the graph is a PReLU, whose slopes XNNPACK reads when it runs, after ExecuTorch has "
                "freed the payload: the program would crash; keep the constants in named data, as ExecuTorch does"
            )
