"""Data that delegates share by name, in the program or in files of their own (``.ptd``).

ExecuTorch keeps it in a ``NamedDataStore``, which merges equal data by SHA-256.  Here the data goes to disk, and the
store has a stand-in: ``FileBackedData`` from 1.5 on, before that a placeholder, whose SHA-256 is equal to another's
exactly where the data is.

Imports ExecuTorch and torch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from stream_pack.executorch.export import hooks_memory
from stream_pack.executorch.export.held import SMALL_NBYTES, Held
from stream_pack.executorch.export.hooks_program import cord
from stream_pack.executorch.export.patching import Hook
from stream_pack.executorch.export.placeholder import HeldBytes
from stream_pack.executorch.export.session import Export
from stream_pack.executorch.export.tensors import hold_tensor

_stand_in: Callable[[Held, str], Any]
try:
    from stream_pack.executorch.export.held_file import HeldFile
except ImportError:  # before 1.5
    _stand_in = HeldBytes
else:

    def _stand_in(held: Held, label: str) -> HeldFile:
        return HeldFile(held)


__all__ = ["HOOKS"]


def _add(
    export: Export,
    stock: Callable[..., Any],
    self: Any,
    key: str,
    data: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    label = f"the data {key!r}"
    if isinstance(data, HeldBytes):
        key = _true_key(key, data)
        data = _stand_in(data.held, label)
    elif type(data) is bytes and len(data) >= SMALL_NBYTES:
        data = _stand_in(export.holder.hold_memory(memoryview(data)), label)
    stock(self, key, data, *args, **kwargs)


def _true_key(key: str, data: HeldBytes) -> str:
    """``key``, with the content's SHA-256 where it has the placeholder's."""
    this = hooks_memory.current()
    wrong = hashlib.sha256(data).hexdigest()
    if this is None or not key.endswith(wrong):
        return key
    true = key.removesuffix(wrong) + data.held.sha256_digest().hex()
    this.keys[key] = true
    return true


def _tensor_bytes(export: Export, stock: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """The tensor's elements in the order of its dims in memory, which the store keeps as its layout.

    Like ExecuTorch's, except for a view, of which ExecuTorch would take the whole storage.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
        return stock(tensor)
    ordered = tensor.detach().permute(tensor.dim_order())
    held = hold_tensor(export.holder, ordered, name="of a named data store")
    if held.nbytes < SMALL_NBYTES:
        return held.read(0, held.nbytes)
    return _stand_in(held, f"a tensor of shape {list(tensor.shape)}")


_STORE = "executorch.exir._serialize._named_data_store"

HOOKS = (
    Hook(
        _STORE,
        "NamedDataStore.add_named_data",
        _add,
        signature="(self, key, data, alignment=1, external_tag=None, tensor_layout=None)",
    ),
    Hook(_STORE, "_tensor_to_bytes", _tensor_bytes),
    Hook("executorch.extension.flat_tensor.serialize.serialize", "Cord", cord),
)
