"""MPS delegate payloads whose constants go to disk as the graph is made (ExecuTorch up to 1.4).

Some constants that ExecuTorch gets wrong are right here: a view has its own elements instead of its storage's first
bytes, elements have the type that the graph says, constants are merged only if type and elements are equal, and
nothing is left over from another export.

Imports torch.  ExecuTorch's MPS backend is hooked only once other code has imported it: importing it warns and
configures logging.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from stream_pack.errors import FormatError, SourceError, UnsupportedTensorError
from stream_pack.et_files.mps_types import MPS_TYPES, Runtime
from stream_pack.executorch.export.held import Held
from stream_pack.executorch.export.hooks_program import StreamedCord
from stream_pack.executorch.export.mps_pack import HeldConstant, Region, assemble, plan_region
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.placeholder import HeldBytes, held_in
from stream_pack.executorch.export.session import Export
from stream_pack.executorch.export.tensors import digest_of, hold_tensor
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.graph_mps import check_nodes
from stream_pack.text import quoted

__all__ = ["HOOKS"]

FLOAT32, FLOAT16, INT4 = (DTYPES[BY_NAME[name]].mps for name in ("float32", "float16", "int4"))
_ELEMENTS: dict[int, torch.dtype] = {
    mps.number: getattr(torch, mps.name)
    for mps in MPS_TYPES.values()
    if mps.runtime is not Runtime.ABORTS and mps.number != INT4
}
"""What a constant is cast to, by MPSDataType.  ExecuTorch labels its float64 constants float32; a graph that does say
float64 gets float64."""


@dataclass(frozen=True, slots=True)
class _Program:
    """What one call of ``preprocess`` knows: names of parameters and buffers by node, and labels by number of value."""

    names: dict[str, str]
    labels: dict[int, str] = field(default_factory=dict)


def _serialized_buffer(
    export: Export,
    stock: Stock,
    self: Any,
    node: torch.fx.Node,
    mps_graph: Any,
    node_id: int,
    mps_data_type: Any = None,
) -> tuple[int, Any, Any]:
    """Like ExecuTorch's, except that it notes the tensor's name, and makes no contiguous copy."""
    from executorch.backends.apple.mps.utils.mps_utils import get_param_tensor, is_parameter

    if not is_parameter(self.exported_program, node):
        return stock(self, node, mps_graph, node_id, mps_data_type)  # type: ignore[no-any-return]
    if mps_data_type is None:
        mps_data_type = self.get_serialized_dtype(node)
    program: _Program = export.state[__name__]
    program.labels[node_id] = program.names.get(node.name, node.name)
    tensor = get_param_tensor(self.exported_program, node)
    return self.get_serialized_data(tensor, mps_graph, mps_data_type, node_id)  # type: ignore[no-any-return]


def _serialized_data(
    export: Export, stock: Stock, self: Any, tensor: torch.Tensor, mps_graph: Any, mps_data_type: Any, id: int
) -> tuple[int, Any, Any]:
    """Hold the constant's elements on disk instead of copying its storage; returns a placeholder for them."""
    schema = _schema()
    name = export.state[__name__].labels.get(id, f"constant {id}")
    if tensor.numel() == 0:
        raise UnsupportedTensorError(
            f"{name} has no elements: the MPS runtime aborts on such a constant; keep it out of the delegate",
            tensor=name,
        )
    if mps_data_type == INT4:
        # Only code on the device can pack these: ExecuTorch does it, one tensor at a time.
        nbytes, buffer, mps_data_type = stock(self, tensor, mps_graph, mps_data_type, id)
        held = export.holder.hold([buffer.storage], nbytes, label=f"the constant {quoted(name)}")
    else:
        if self.convert_model_to_fp16 and mps_data_type == FLOAT32:
            mps_data_type = schema.MPSDataType(FLOAT16)
        if int(mps_data_type) not in _ELEMENTS:
            raise UnsupportedTensorError(
                f"{name} is a constant of {tensor.dtype}: the MPS runtime aborts on it; cast it before the export, or "
                "keep it out of the delegate",
                tensor=name,
            )
        held = hold_tensor(export.holder, tensor, name=name, dtype=_ELEMENTS[int(mps_data_type)])
        if id not in mps_graph.constant_ids:
            mps_graph.constant_ids.append(id)
    return held.nbytes, schema.Buffer(storage=HeldBytes(held, name)), mps_data_type


def _define_scalar(
    export: Export, stock: Stock, self: Any, val: float | int, mps_data_type: Any, mps_graph: Any
) -> int:
    """Like ExecuTorch's, except that 1, 1.0 and True are different constants, and so are those of different types."""
    key = (type(val), repr(val), int(mps_data_type))
    if key in self.tensor_to_id:
        return self.tensor_to_id[key]  # type: ignore[no-any-return]
    number: int = self.get_serialized_id(key, mps_graph)
    nbytes, buffer, mps_data_type = self.get_serialized_data(torch.tensor(val), mps_graph, mps_data_type, number)
    tensor = _schema().MPSTensor(
        datatype=mps_data_type, num_dims=1, dims=[1], constant_buffer_size=nbytes, constant_buffer=buffer
    )
    mps_graph.mps_values.append(tensor)
    return number


def _hash_tensor(export: Export, stock: Stock, self: Any, tensor: torch.Tensor) -> object:
    """A key that is equal for equal constants only: ExecuTorch's, Python's hash of the numbers, is the same for -1 and
    -2, and for any type and shape."""
    return str(tensor.dtype), tuple(tensor.shape), digest_of(tensor)


def _node_visitors(export: Export, stock: Stock, *args: Any) -> dict[str, Any]:
    """Visitors whose numbers of tensors are those of one program, not of all that the process has exported."""
    visitors: dict[str, Any] = stock(*args)
    numbers: dict[Any, Any] = {}
    for visitor in visitors.values():
        visitor._tensor_to_id = numbers
    signature = args[0].graph_signature
    export.state[__name__] = _Program({**signature.inputs_to_parameters, **signature.inputs_to_buffers})
    return visitors


def _constant_segment(export: Export, stock: Stock, mps_graph: Any) -> tuple[StreamedCord | Region, Any]:
    """Give each constant its offset; returns what the region consists of."""
    if export.alignment == "stock":
        return stock(mps_graph)  # type: ignore[no-any-return]
    labels = export.state[__name__].labels
    constants = []
    for number in mps_graph.constant_ids:
        value = mps_graph.mps_values[number]
        held = held_in(value.constant_buffer.storage)
        assert held is not None, "every constant came through _serialized_data"
        name = labels.get(number, str(number))
        constants.append(HeldConstant(number, name, int(value.datatype), tuple(value.dims), held))
    region = plan_region(constants)
    for constant, offset in zip(constants, region.offsets, strict=True):
        value = mps_graph.mps_values[constant.id]
        value.constant_buffer = _schema().Buffer(storage=b"")
        value.segment_offset = offset
    return region, mps_graph


class _Payload(StreamedCord):
    """The payload as ``preprocess`` assembles it: header, graph, padding, constants.

    With a region it becomes a pack, which has its own header and padding.
    """

    _region: Region | None = None

    def append(self, data: Any) -> None:
        if isinstance(data, Region):
            self._region = data
        else:
            super().append(data)

    def __bytes__(self) -> bytes:
        _, graph, *_ = self._buffers
        try:
            check_nodes(memoryview(graph))  # as ExecuTorch alone does not
        except FormatError as error:
            raise SourceError(str(error)) from None
        held = Held.compose(self._buffers) if self._region is None else assemble(self._region, graph)
        # Other code that calls preprocess() may do anything with the payload.
        caller = sys._getframe(2).f_globals.get("__name__")
        placeholder = HeldBytes(held, "an MPS payload")
        return placeholder if caller in _LOWERING else bytes(placeholder)


def _payload(export: Export, stock: Stock, data: Any = None) -> _Payload:
    return _Payload(data)


def _schema() -> Any:
    return sys.modules["executorch.backends.apple.mps.serialization.mps_graph_schema"]


_LOWERING = ("executorch.exir.backend.backend_api", "executorch.exir.backend.backend_details")
"""Modules that call ``preprocess`` to lower a program."""

_VISITOR = "executorch.backends.apple.mps.operators.node_visitor"
_PREPROCESS = "executorch.backends.apple.mps.mps_preprocess"

HOOKS = (
    Hook(_VISITOR, "NodeVisitor.get_serialized_data", _serialized_data, late=True),
    Hook(_VISITOR, "NodeVisitor.get_serialized_buffer", _serialized_buffer, late=True),
    Hook(_VISITOR, "NodeVisitor.define_scalar", _define_scalar, late=True),
    Hook(_VISITOR, "NodeVisitor.hash_tensor", _hash_tensor, late=True),
    Hook(_PREPROCESS, "get_node_visitors", _node_visitors, late=True),
    Hook(_PREPROCESS, "_extract_constant_segment", _constant_segment, late=True),
    Hook(_PREPROCESS, "Cord", _payload, late=True),
)
