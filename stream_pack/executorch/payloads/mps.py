"""Payloads of ExecuTorch's MPS delegate, from its own graph and the tensors that the graph refers to.

The MPS backend exists up to ExecuTorch 1.4.1.  Its runtime checks no bound, and aborts the process on a dtype that it
does not read, so such a constant is refused here.
Source: ExecuTorch 1.4.1, backends/apple/mps/serialization/schema.fbs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from stream_pack.errors import FormatError, SourceError, UnsupportedTensorError
from stream_pack.et_files.mps_types import MPS_TYPES, Runtime
from stream_pack.executorch.payloads.constants import GraphConstant, Tensors, name_constants, write_payload
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.graph_mps import check_nodes
from stream_pack.format.header_kinds import KINDS
from stream_pack.writer.flow import Progress
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.report import Report
from stream_pack.writer.sink import BinaryWriter

if TYPE_CHECKING:
    from executorch.backends.apple.mps.serialization.mps_graph_schema import MPSGraph

__all__ = ["build_mps_payload", "encode_graph"]


def build_mps_payload(
    graph: MPSGraph,
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
    """Write the payload of ``graph``, streaming its constants into it: a pack that the MPS delegate runs.

    ``graph`` is an ``MPSGraph`` from ExecuTorch's own visitors, which is not changed; any bytes and positions of
    constants in it are ignored.  ``constants`` has the module's tensor (torch or NumPy) for each of its
    ``constant_ids``, by number; in a source, its name is that number.  Floats are cast to a narrower dtype that the
    graph asks for (float16, float32); for 4-bit constants, give the packed bytes.
    ``names``: the names of constants in the pack, by id; by default their ids.
    ``target`` and the other options: as for :func:`stream_pack.convert`.

    Copies: none of contiguous tensors on the CPU that are not cast; else a chunk at a time.
    Raises: SourceError for a graph that refers to values it does not have, and for constants or names that are missing
    or not in the graph; UnsupportedTensorError for a constant that the runtime would abort on, or that does not match
    the graph; LimitError; OSError.  A file at ``target`` is then unchanged.
    """
    options = ConvertOptions(
        metadata=metadata, alignment=alignment, block_nbytes=block_nbytes, jobs=jobs, max_memory=max_memory,
        spool_dir=spool_dir, progress=progress,
        allow_blowup=True,  # the graph fixes what each constant holds, expanded views too
    )  # fmt: skip
    named = name_constants("value", _constant_ids(graph), names)
    wanted = [_constant(graph, *constant) for constant in named]
    encode = partial(_encode_checked, graph)
    return write_payload(KINDS["mps"], encode, constants, wanted, target, options)


def encode_graph(graph: MPSGraph, offsets: Sequence[int], nbytes: Sequence[int]) -> bytes:
    """The flatbuffer of ``graph``, by ExecuTorch's own serializer, with its constants at the given places.

    ``offsets`` and ``nbytes``: one for each of ``constant_ids``, in bytes; offsets count from the region's first one.
    ``graph`` is not changed; bytes that are still in its values are left out.
    """
    from executorch.backends.apple.mps.serialization.mps_graph_schema import Buffer
    from executorch.backends.apple.mps.serialization.mps_graph_serialize import convert_to_flatbuffer

    placed = copy.copy(graph)
    placed.mps_values = list(graph.mps_values)
    for number, offset, length in zip(_constant_ids(graph), offsets, nbytes, strict=True):
        placed.mps_values[number] = replace(
            graph.mps_values[number],
            constant_buffer_size=length,
            constant_buffer=Buffer(storage=b""),
            segment_offset=offset,
        )
    encoded: bytes = convert_to_flatbuffer(placed)
    return encoded


def _encode_checked(graph: MPSGraph, offsets: Sequence[int], nbytes: Sequence[int]) -> bytes:
    encoded = encode_graph(graph, offsets, nbytes)
    try:
        check_nodes(memoryview(encoded))
    except FormatError as error:
        raise SourceError(str(error)) from None
    return encoded


def _constant_ids(graph: MPSGraph) -> list[int]:
    """The graph's constant ids, proved to be different numbers of values."""
    ids = [int(number) for number in graph.constant_ids]
    values = len(graph.mps_values)
    met: set[int] = set()
    for number in ids:
        if not 0 <= number < values:
            raise SourceError(
                f"the graph's constant_ids name value {number}, but it has {values} values: ExecuTorch does this when "
                "it has exported before in this process; clear NodeVisitor._tensor_to_id before an export"
            )
        if number in met:
            raise SourceError(f"the graph's constant_ids name value {number} more than once")
        met.add(number)
    return ids


def _constant(graph: MPSGraph, number: int, name: str, label: str) -> GraphConstant:
    """What the graph says of its value ``number``, proved to be something that the runtime reads."""
    value = graph.mps_values[number]
    dims = tuple(int(dim) for dim in value.dims)
    if value.num_dims != len(dims):
        raise UnsupportedTensorError(f"{label} has num_dims {value.num_dims}, but {len(dims)} dims", tensor=name)
    mps = MPS_TYPES.get(int(value.datatype))
    # float64 is refused too: the runtime would read its bytes as float32.
    if mps is None or mps.runtime is not Runtime.READS:
        called = mps.name if mps else f"MPSDataType {int(value.datatype)}"
        raise UnsupportedTensorError(
            f"{label} is {called}, which the MPS runtime does not read as such: it aborts, or reads another dtype; "
            "cast the tensor in the module before the export",
            tensor=name,
        )
    return GraphConstant(label, (str(number),), name, dtype=mps.dtype, dims=dims)
