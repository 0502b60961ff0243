"""Data that delegates share by name, in the program or in files of their own (``.ptd``).

ExecuTorch keeps it in a ``NamedDataStore``, which merges equal data by SHA-256.  Here the data goes to disk, and the
store has a stand-in: ``FileBackedData`` from 1.5 on, before that a placeholder, whose SHA-256 is equal to another's
exactly where the data is.

Imports ExecuTorch and torch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO

import torch

from stream_pack.executorch.export import hooks_memory
from stream_pack.executorch.export.held import SMALL_NBYTES, Held, OnDisk
from stream_pack.executorch.export.hooks_program import StreamedCord, cord
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.placeholder import HeldBytes
from stream_pack.executorch.export.session import Export
from stream_pack.executorch.export.tensors import hold_tensor
from stream_pack.text import quoted

try:
    from executorch.exir._serialize._cord import FileBackedData
except ImportError:  # before 1.5
    FileBackedData = None

__all__ = ["HOOKS"]


class HeldFile(OnDisk, FileBackedData or object):  # type: ignore[misc]
    """``held``, for code that takes file-backed data: in a block and after it, nothing has to be replaced."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def __len__(self) -> int:
        return self.held.nbytes

    def prefix(self, size: int) -> bytes:
        return self.held.read(0, min(size, self.held.nbytes))

    def sha256(self) -> bytes:
        return self.held.sha256_digest()

    def to_bytes(self) -> bytes:
        return self.held.read(0, self.held.nbytes)

    def write_to_file(self, outfile: BinaryIO) -> None:
        StreamedCord(self).write_to_file(outfile)

    def close(self) -> None:
        """Nothing: the bytes stay on disk while anything refers to them."""


def _stand_in(held: Held, label: str) -> HeldBytes | HeldFile:
    return HeldBytes(held, label) if FileBackedData is None else HeldFile(held)


def _add(export: Export, stock: Stock, self: Any, key: str, data: Any, *args: Any, **kwargs: Any) -> None:
    label = f"the data {quoted(key)}"
    if isinstance(data, HeldBytes):
        key = _true_key(key, data)
        data = _stand_in(data.held, label)
    elif type(data) is bytes and len(data) >= SMALL_NBYTES:
        data = _stand_in(export.holder.hold_memory(memoryview(data), label=label), label)
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


def _tensor_bytes(export: Export, stock: Stock, tensor: torch.Tensor) -> Any:
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
