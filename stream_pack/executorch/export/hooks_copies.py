"""Copies of the model that an export makes as a precaution: in a block they are made when somebody writes to them.

ExecuTorch deep-copies the program that it hands to a backend, which may then write to it, and a weight that two
backends use.  Strict export (``torch.export.export(..., strict=True)``, as in ExecuTorch's Llama export) keeps two
clones of each weight, in case a condition has to be evaluated.  All of them become torch's lazy clones, which share
the memory of the original until either is written to, or asked for a pointer that may be written through.

Imports torch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from stream_pack.executorch.export.held import SMALL_NBYTES
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.session import Export

__all__ = ["HOOKS"]

BACKENDS = ("executorch.exir.backend.backend_api", "executorch.exir.backend.backend_details")
"""Modules that copy a program for a backend, which may do with it as it likes."""

LOWERING = (
    *BACKENDS,
    "executorch.exir.backend.canonical_partitioners.duplicate_constant_node_pass",
    "executorch.exir.program._program",
)
"""Modules that copy programs and weights to rearrange graphs.  A deepcopy that any other module makes is a real one."""

READERS = ("MPSBackend", "XnnpackBackend")
"""Backends that are known to write to no weight: they are given the weights themselves.

A lazy clone would do for them too; not so where torch cannot make one, of memory that it did not allocate.
"""


def _deepcopy(export: Export, stock: Stock, x: Any, memo: dict[int, Any] | None = None, *rest: Any) -> Any:
    frame = _caller()
    module = frame.f_globals.get("__name__")
    if module in LOWERING:
        memo = {} if memo is None else memo
        reads = _backend(frame) in READERS
        for tensor in _weights(x):
            if reads:
                memo[id(tensor)] = tensor
            else:
                _copy_lazily(tensor, memo, share=module not in BACKENDS)
    return stock(x, memo, *rest)


def _caller() -> FrameType:
    """The function that called the replaced one."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].startswith("stream_pack."):
        frame = frame.f_back
    return frame


def _backend(caller: FrameType) -> str | None:
    """The id of the backend that a program is copied for, as the functions of :data:`BACKENDS` know it."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_globals.get("__name__") in BACKENDS:  # comprehensions have frames too
        variables = frame.f_locals
        if "backend_id" in variables:
            return str(variables["backend_id"])
        if isinstance(variables.get("cls"), type):
            return str(variables["cls"].__name__)
        frame = frame.f_back
    return None


def _copy_lazily(tensor: torch.Tensor, memo: dict[Any, Any], *, share: bool) -> None:
    """Let deepcopy find a lazy clone of ``tensor`` in its ``memo``; where there is none, to ``share``, the tensor."""
    if id(tensor) in memo:
        return
    if type(tensor) is torch.Tensor:
        # Where Tensor.__deepcopy__ looks it up: tensors of one storage still share one in the copy.
        storage = tensor.untyped_storage()
        storages = memo.setdefault("torch", {})
        clone = None if storage._cdata in storages else _lazy_clone(tensor, storage.nbytes())
        if clone is not None:
            storages[storage._cdata] = clone.untyped_storage()
        missing = storage._cdata not in storages
    elif type(tensor) is torch.nn.Parameter:
        clone = _lazy_clone(tensor, tensor.nbytes)
        if clone is not None:
            memo[id(tensor)] = torch.nn.Parameter(clone, tensor.requires_grad)
        missing = clone is None
    else:
        missing = True
    if missing and share:
        memo[id(tensor)] = tensor


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
        clone = _lazy_clone(value, value.nbytes)
        if clone is None and type(value) is torch.nn.Parameter and value.nbytes >= SMALL_NBYTES:
            clone = value.detach()  # a mapped file, say: inference does not write to a parameter
    elif is_traceable_wrapper_subclass(value):
        clone = _lazy_clone_parts(value)
    else:
        clone = None
    if clone is None:
        return stock(value, fake_mode)
    return clone.requires_grad_(value.requires_grad) if value.is_leaf else clone


def _lazy_clone(tensor: torch.Tensor, nbytes: int) -> torch.Tensor | None:
    """A clone that takes memory only once it, or ``tensor``, is written to; None where torch has no such clone.

    ``nbytes``: how much memory is at stake; a few bytes are not worth it.
    """
    if tensor.layout != torch.strided or nbytes < SMALL_NBYTES:
        return None
    try:
        return tensor.detach()._lazy_clone()
    except RuntimeError:  # of memory that torch did not allocate, such as a mapped file
        return None


def _lazy_clone_parts(tensor: torch.Tensor) -> torch.Tensor:
    def clone(name: str, part: torch.Tensor) -> torch.Tensor:
        lazy = _lazy_clone(part, part.nbytes) if type(part) is torch.Tensor else None
        return part.clone() if lazy is None else lazy

    cloned: torch.Tensor = transform_subclass(tensor.detach(), clone)  # type: ignore[no-untyped-call]
    return cloned


HOOKS = (
    Hook("copy", "deepcopy", _deepcopy, signature="(x, memo=None, _nil=[])"),
    Hook("torch._dynamo.variables.builder", "_clone_input", _clone_input, optional=True),
)
