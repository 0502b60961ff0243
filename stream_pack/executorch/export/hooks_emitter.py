"""Constants that no delegate takes, as an embedding in an XNNPACK export: the emitter puts them into the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stream_pack.executorch.export.hooks_memory import reading
from stream_pack.executorch.export.patching import Hook
from stream_pack.executorch.export.session import Export

__all__ = ["HOOKS"]


def _emit_tensor(
    export: Export, stock: Callable[..., Any], self: Any, spec: Any, constant_tag: str | None = None
) -> Any:
    with reading(_label(spec), sha256=False):
        return stock(self, spec, constant_tag)


def _label(spec: Any) -> str:
    name = getattr(spec.extra_tensor_info, "fully_qualified_name", None)
    return f"the constant {name!r}" if name else f"a constant of shape {list(spec.shape)}"


HOOKS = (Hook("executorch.exir.emit._emitter", "_Emitter._tensor_spec_to_evalue", _emit_tensor),)
