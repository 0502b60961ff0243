"""XNNPACK's constants: from the tensor's memory to disk, under the same names as in ExecuTorch.

What ExecuTorch computes before it reads the bytes, it computes for a whole tensor at a time: another memory format,
fp32 of another dtype, quantized values.

Imports torch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

from typing import Any

import torch

from stream_pack.executorch.export.hooks_memory import reading
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.session import Export
from stream_pack.executorch.export.tensors import SERIAL_ELEMENTS, readable
from stream_pack.pipeline.memory import trim_heap

__all__ = ["HOOKS"]


def _serialize_constant(
    export: Export, stock: Stock, self: Any, what: Any, xnn_graph: Any, *args: Any, **kwargs: Any
) -> Any:
    """A weight, or the scales of one: both are named after their SHA-256 and listed in ``constant_data``."""
    begin = len(xnn_graph.constant_data)
    node = getattr(what, "q_input", what)
    with reading(f"XNNPACK's constant {node}", sha256=True) as this:
        result = stock(self, what, xnn_graph, *args, **kwargs)
    for entry in xnn_graph.constant_data[begin:]:
        entry.named_key = this.keys.get(entry.named_key, entry.named_key)
    # ExecuTorch's copies of the tensor are freed by now; glibc would keep some of that memory.
    trim_heap()
    return result


def _param_tensor(export: Export, stock: Stock, exp_prog: Any, node: Any) -> torch.Tensor | None:
    """ExecuTorch goes on to read the whole storage, so a view gets one of its own."""
    tensor = stock(exp_prog, node)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_contiguous():
        return tensor  # type: ignore[no-any-return]
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor  # type: ignore[no-any-return]
    return readable(tensor)


def _pack_nibbles(export: Export, stock: Stock, inp: torch.Tensor) -> torch.Tensor:
    """ExecuTorch's, some rows at a time, because it makes four copies of its argument."""
    if inp.ndim != 2 or not inp.numel():
        return stock(inp)  # type: ignore[no-any-return]
    rows, columns = inp.shape
    step = max(1, SERIAL_ELEMENTS // columns)
    packed = torch.empty((rows, -(-columns // 2)), dtype=torch.uint8)
    for begin in range(0, rows, step):
        packed[begin : begin + step] = stock(inp[begin : begin + step])
    return packed


_VISITOR = "executorch.backends.xnnpack.operators.node_visitor"
_QUANT_PARAMS = "executorch.backends.xnnpack.operators.quant_params"
_SERIALIZE = (
    "(self, tensor, xnn_graph, vals_to_ids, convert_to_nhwc, swap_in_out_for_weights, quant_params, "
    "force_fp32=False, groups=1)"
)

HOOKS = (
    Hook(_VISITOR, "NodeVisitor.get_serialized_buffer_index", _serialize_constant, signature=_SERIALIZE, late=True),
    Hook(
        _VISITOR,
        "NodeVisitor.get_quant_params",
        _serialize_constant,
        signature="(self, quant_params, xnn_graph, external_tag=None)",
        late=True,
    ),
    Hook(_VISITOR, "NodeVisitor.convert_to_qc4w", _pack_nibbles, late=True),
    Hook(_VISITOR, "get_param_tensor", _param_tensor, late=True),
    Hook(_QUANT_PARAMS, "get_param_tensor", _param_tensor, late=True),
)
