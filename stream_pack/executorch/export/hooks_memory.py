"""Memory that ExecuTorch copies by ``bytes(ctypes.cast(address, ctypes.POINTER(ctypes.c_char * n)).contents)``.

This is how functions that are too long to replace read a constant.  While one of them runs, the expression gives a
placeholder, and the memory goes to disk.  Should a version of ExecuTorch read a constant in another way, it gets the
bytes as always: more memory is used, and nothing else changes.

Imports torch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stream_pack.executorch.export.held import SMALL_NBYTES, Holder
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.placeholder import HeldBytes
from stream_pack.executorch.export.session import Export
from stream_pack.executorch.export.tensors import readable_storage
from stream_pack.text import quoted

__all__ = ["HOOKS", "Reading", "reading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A function of ExecuTorch that is about to read the constant ``label``.

    ``sha256``: whether that digest of it will be needed.  ``keys``: names that ExecuTorch has made from the
    placeholder's SHA-256 -> the names with the content's.
    """

    label: str
    sha256: bool
    keys: dict[str, str] = field(default_factory=dict)


_READING: ContextVar[Reading | None] = ContextVar("stream_pack_reading", default=None)


def current() -> Reading | None:
    """The reading in this thread, if there is one."""
    return _READING.get()


@contextlib.contextmanager
def reading(label: str, *, sha256: bool) -> Iterator[Reading]:
    """Inside this, the thread's copies of memory are placeholders."""
    this = Reading(label=label, sha256=sha256)
    token = _READING.set(this)
    try:
        yield this
    finally:
        _READING.reset(token)


@dataclass(slots=True, eq=False)
class _Pointer:
    """The result of ``ctypes.cast``, of which only ``bytes(pointer.contents)`` is used."""

    holder: Holder
    reading: Reading
    address: int
    nbytes: int
    placeholder: HeldBytes | None = None

    @property
    def contents(self) -> _Pointer:
        return self

    def __bytes__(self) -> HeldBytes:
        if self.placeholder is None:
            array = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
            held = self.holder.hold_memory(memoryview(array), label=self.reading.label, sha256=self.reading.sha256)
            self.placeholder = HeldBytes(held, self.reading.label)
        return self.placeholder


def _cast(export: Export, stock: Stock, obj: Any, typ: Any) -> Any:
    this, nbytes = _READING.get(), _chars(typ)
    if this is None or nbytes < SMALL_NBYTES or not isinstance(obj, int):
        return stock(obj, typ)
    return _Pointer(export.holder, this, obj, nbytes)


def _chars(pointer: Any) -> int:
    """``n`` of ``POINTER(c_char * n)``; 0 for a pointer to anything else."""
    array: Any = getattr(pointer, "_type_", None)
    if getattr(array, "_type_", None) is not ctypes.c_char:
        return 0
    return int(getattr(array, "_length_", 0))


def _emit_tensor(export: Export, stock: Stock, self: Any, spec: Any, constant_tag: str | None = None) -> Any:
    """A constant that no delegate takes, such as an embedding in an XNNPACK export."""
    name = getattr(spec.extra_tensor_info, "fully_qualified_name", None)
    label = f"the constant {quoted(name)}" if name else f"a constant of shape {list(spec.shape)}"
    storage = spec.storage
    if storage is not None and storage.device.type == "cpu" and storage.nbytes() >= SMALL_NBYTES:
        spec.storage = readable_storage(storage)
    try:
        with reading(label, sha256=False):
            return stock(self, spec, constant_tag)
    finally:
        spec.storage = storage


HOOKS = (
    Hook("ctypes", "cast", _cast),
    Hook("executorch.exir.emit._emitter", "_Emitter._tensor_spec_to_evalue", _emit_tensor),
)
