"""Memory that ExecuTorch copies by ``bytes(ctypes.cast(address, ctypes.POINTER(ctypes.c_char * n)).contents)``.

That is how it gets at a constant's bytes, in functions that are too long to write again.  While one of them runs, the
expression gives a placeholder, and the memory goes to disk.  Should a version of ExecuTorch read a constant in another
way, it gets its bytes as always: more memory is used, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stream_pack.executorch.export.held import SMALL_NBYTES, chunks_of
from stream_pack.executorch.export.patching import Hook
from stream_pack.executorch.export.placeholder import HeldBytes
from stream_pack.executorch.export.session import Export

__all__ = ["HOOKS", "Reading", "reading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A function of ExecuTorch that is about to read the constant ``label``.

    ``sha256``: whether somebody is going to need that digest of it.  ``keys``: names that ExecuTorch has made of the
    placeholder's SHA-256, and what they are with the content's.
    """

    label: str
    sha256: bool
    keys: dict[str, str] = field(default_factory=dict)


_READING: ContextVar[Reading | None] = ContextVar("stream_pack_reading", default=None)


def current() -> Reading | None:
    """The reading that goes on in this thread."""
    return _READING.get()


@contextlib.contextmanager
def reading(label: str, *, sha256: bool) -> Iterator[Reading]:
    """Until left, this thread's copies of memory are placeholders."""
    this = Reading(label=label, sha256=sha256)
    token = _READING.set(this)
    try:
        yield this
    finally:
        _READING.reset(token)


class _Pointer:
    """What ``ctypes.cast`` gives: only ``contents`` is asked of it, and of that only ``bytes()``."""

    def __init__(self, export: Export, this: Reading, address: int, nbytes: int) -> None:
        self._export = export
        self._reading = this
        self._address = address
        self._nbytes = nbytes
        self._placeholder: HeldBytes | None = None

    @property
    def contents(self) -> _Pointer:
        return self

    def __bytes__(self) -> HeldBytes:
        if self._placeholder is None:
            memory = np.ctypeslib.as_array(
                (ctypes.c_uint8 * self._nbytes).from_address(self._address)
            )
            held = self._export.holder.hold(
                chunks_of(memoryview(memory), self._export.holder.chunk_nbytes),
                self._nbytes,
                sha256=self._reading.sha256,
            )
            self._placeholder = HeldBytes(held, self._reading.label)
        return self._placeholder


def _cast(export: Export, stock: Callable[..., Any], obj: Any, typ: Any) -> Any:
    this, nbytes = _READING.get(), _chars(typ)
    if this is None or nbytes < SMALL_NBYTES or not isinstance(obj, int):
        return stock(obj, typ)
    return _Pointer(export, this, obj, nbytes)


def _chars(pointer: Any) -> int:
    """``n`` of ``POINTER(c_char * n)``; 0 for a pointer to anything else."""
    array: Any = getattr(pointer, "_type_", None)
    if getattr(array, "_type_", None) is not ctypes.c_char:
        return 0
    return int(getattr(array, "_length_", 0))


HOOKS = (Hook("ctypes", "cast", _cast),)
