"""Programs with their XNNPACK payloads taken out and others put in, and what the Linux runtime makes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import executorch.backends.xnnpack.serialization as xnnpack_schema
import numpy as np
import torch
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNGraph
from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader
from executorch.exir._serialize._flatbuffer_program import _program_to_flatbuffer
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize._program import (
    _ExtendedHeader,
    _insert_flatbuffer_header,
    deserialize_pte_binary,
    serialize_pte_binary,
)
from executorch.exir.schema import BackendDelegateDataReference, DataLocation, DataSegment, SubsegmentOffsets
from executorch.extension.pybindings import portable_lib

from tests.executorch.flatc import decoded, graph_of

__all__ = [
    "Build",
    "named_data",
    "run",
    "run_file",
    "with_payload_beyond",
    "with_payloads",
    "xnn_graph",
    "xnn_json",
    "xnnpack_payloads",
]

Build = Callable[[bytes, Mapping[str, bytes]], bytes]
"""From a stock payload, and the program's named data, to the payload that takes its place."""


def xnnpack_payloads(program: bytes) -> list[bytes]:
    file = deserialize_pte_binary(program)
    return [bytes(file.program.backend_delegate_data[place].data) for place in _places(file)]


def named_data(program: bytes) -> dict[str, bytes]:
    return _named(deserialize_pte_binary(program))


def xnn_json(payload: bytes) -> dict[str, Any]:
    """The payload's graph, by ExecuTorch's own header, compiler and schema."""
    header = XNNHeader.from_bytes(payload[: XNNHeader.EXPECTED_LENGTH])
    end = header.flatbuffer_offset + header.flatbuffer_size
    return decoded(payload[header.flatbuffer_offset : end], xnnpack_schema.__name__)


def xnn_graph(payload: bytes) -> Any:
    return graph_of(xnn_json(payload), XNNGraph)


def with_payloads(program: bytes, build: Build) -> bytes:
    """``program`` with each XNNPACK payload replaced by what ``build`` makes of it, and without named data."""
    file = deserialize_pte_binary(program)
    named = _named(file)
    for place in _places(file):
        delegate = file.program.backend_delegate_data[place]
        delegate.data = build(bytes(delegate.data), named)
    file.named_data = None
    return bytes(serialize_pte_binary(file, extract_delegate_segments=True, segment_alignment=16384))


def with_payload_beyond(program: bytes, payload: Path, target: Path) -> None:
    """``program`` with its only payload replaced by the sparse file ``payload``, holes kept, written to ``target``."""
    file = deserialize_pte_binary(program)
    (_,) = _places(file)
    plan = file.program
    nbytes = payload.stat().st_size
    plan.execution_plan[0].delegates[0].processed = BackendDelegateDataReference(location=DataLocation.SEGMENT, index=1)
    plan.backend_delegate_data = []
    plan.constant_buffer = []
    plan.constant_segment = SubsegmentOffsets(segment_index=0, offsets=[0])
    plan.segments = [DataSegment(offset=0, size=0), DataSegment(offset=0, size=nbytes)]
    flatbuffer = _program_to_flatbuffer(plan).data
    base = -(-(64 + len(flatbuffer)) // 16384) * 16384
    header = _ExtendedHeader(
        program_size=64 + len(flatbuffer), segment_base_offset=base, segment_data_size=nbytes
    ).to_bytes()
    start = _insert_flatbuffer_header(flatbuffer, "ET..", header.ljust(64, b"\0"))
    with open(payload, "rb") as source, open(target, "wb") as out:
        out.write(start)
        out.truncate(base + nbytes)
        end = 0
        while end < nbytes:
            begin = os.lseek(source.fileno(), end, os.SEEK_DATA)
            end = os.lseek(source.fileno(), begin, os.SEEK_HOLE)
            out.seek(base + begin)
            out.write(os.pread(source.fileno(), end - begin, begin))


def run(program: bytes, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    """The outputs, from a program in memory."""
    return _outputs(portable_lib._load_for_executorch_from_buffer(program), inputs)


def run_file(path: Path, inputs: Sequence[torch.Tensor], data: Path | None = None) -> list[np.ndarray[Any, Any]]:
    """The outputs, from a program in a file, which the runtime maps."""
    loaded = portable_lib._load_for_executorch(str(path), *([] if data is None else [str(data)]))
    return _outputs(loaded, inputs)


def _outputs(module: Any, inputs: Sequence[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    return [output.numpy().copy() for output in module.forward(tuple(inputs))]


def _places(file: Any) -> list[int]:
    """Where the XNNPACK payloads are in backend_delegate_data, each once."""
    places = [
        delegate.processed.index
        for plan in file.program.execution_plan
        for delegate in plan.delegates
        if delegate.id == "XnnpackBackend"
    ]
    return list(dict.fromkeys(places))


def _named(file: Any) -> dict[str, bytes]:
    data: NamedDataStoreOutput | None = file.named_data
    if data is None:
        return {}
    return {key: bytes(data.buffers[entry.buffer_index]) for key, entry in data.pte_data.items()}
