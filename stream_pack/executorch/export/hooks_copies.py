"""Copies of the model that an export makes as a precaution: in a block they share its memory.

ExecuTorch deep-copies the program that it hands to a backend, and a weight that two backends use.  Strict export
(``torch.export.export(..., strict=True)``, as in ExecuTorch's Llama export) keeps two clones of each weight, in case a
condition has to be evaluated.

Imports torch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from stream_pack.executorch.export.held import SMALL_NBYTES
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.session import Export

__all__ = ["HOOKS"]

LOWERING = (
    "executorch.exir.backend.backend_api",
    "executorch.exir.backend.backend_details",
    "executorch.exir.backend.canonical_partitioners.duplicate_constant_node_pass",
    "executorch.exir.program._program",
)
"""Modules that copy programs and weights to rearrange graphs, and do not write to weights.  A deepcopy that any other
module makes is a real one."""


def _deepcopy(export: Export, stock: Stock, x: Any, memo: dict[int, Any] | None = None, *rest: Any) -> Any:
    if _caller() in LOWERING:
        memo = {} if memo is None else memo
        memo.update((id(tensor), tensor) for tensor in _weights(x))
    return stock(x, memo, *rest)


def _caller() -> str:
    """The module that called the replaced function."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith("stream_pack."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _weights(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, torch.export.ExportedProgram):
        for value in (*x.state_dict.values(), *x.constants.values()):
            if isinstance(value, torch.Tensor):
                yield value
    else:  # a manager of several
        for program in getattr(x, "_edge_programs", {}).values():
            yield from _weights(program)


def _clone_input(export: Export, stock: Stock, value: Any, fake_mode: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_nested or torch._is_functional_tensor(value):
        return stock(value, fake_mode)
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        clone = _lazy_clone(value)
    elif is_traceable_wrapper_subclass(value):
        clone = _lazy_clone_parts(value)
    else:
        clone = None
    if clone is None:
        return stock(value, fake_mode)
    return clone.requires_grad_(value.requires_grad) if value.is_leaf else clone


def _lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A clone that takes memory only once it, or ``tensor``, is written to; None where torch has no such clone."""
    if tensor.layout != torch.strided or tensor.nbytes < SMALL_NBYTES:
        return None
    try:
        return tensor.detach()._lazy_clone()
    except RuntimeError:
        # Memory that torch did not allocate, such as a mapped file.  Inference does not write to a parameter.
        return tensor.detach() if isinstance(tensor, torch.nn.Parameter) else None


def _lazy_clone_parts(tensor: torch.Tensor) -> torch.Tensor:
    def clone(name: str, part: torch.Tensor) -> torch.Tensor:
        lazy = _lazy_clone(part) if type(part) is torch.Tensor else None
        return part.clone() if lazy is None else lazy

    cloned: torch.Tensor = transform_subclass(tensor.detach(), clone)  # type: ignore[no-untyped-call]
    return cloned


HOOKS = (
    Hook("copy", "deepcopy", _deepcopy, signature="(x, memo=None, _nil=[])"),
    Hook("torch._dynamo.variables.builder", "_clone_input", _clone_input, optional=True),
)
