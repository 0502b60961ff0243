"""Program files with constants on disk: what ExecuTorch puts together, it puts together of references.

Imports ExecuTorch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import sys
from collections.abc import Callable
from typing import Any

from executorch.exir._serialize._cord import Cord
from executorch.exir.lowered_backend_module import LoweredBackendModule as StockModule

from stream_pack.executorch.export.held import Held
from stream_pack.executorch.export.patching import Hook
from stream_pack.executorch.export.placeholder import HeldBytes, held_in
from stream_pack.executorch.export.session import Export, active
from stream_pack.format.align import PAGE_NBYTES
from stream_pack.writer.sink import BinaryWriter

__all__ = ["HOOKS", "StreamedCord", "cord"]

EMITTER = "executorch.exir.emit._emitter"
"""Passes a payload on to where placeholders are known, in a block."""
COLLECTOR = "executorch.exir.program._program"
"""Puts what delegates share into one store, which knows placeholders in a block, and refuses them after it."""
MODULE = "executorch.exir.lowered_backend_module"
"""Makes a program of one delegate."""
VERIFIER = "torch._export.verifier"
"""Looks at a payload's type, whenever a program is made or copied."""


class StreamedCord(Cord):  # type: ignore[misc]
    """ExecuTorch's ``Cord``, whose parts may lie on disk: ``_buffers`` has a :class:`Held` for each placeholder.

    It stays what it is after the block, so that whatever a program manager does with it later is right.
    """

    def append(self, data: Any) -> None:
        held = held_in(data)
        if held is None:
            super().append(data)
        else:
            self._buffers.append(held)
            self._byte_size += held.nbytes

    def __bytes__(self) -> bytes:
        whole = io.BytesIO()
        self.write_to_file(whole)
        return whole.getvalue()  # its own bytes, not another copy

    def write_to_file(self, outfile: BinaryWriter) -> None:
        for part in self._buffers:
            if isinstance(part, Held):
                for chunk in part.chunks():
                    _write_all(outfile, chunk)
            elif hasattr(part, "write_to_file"):  # ExecuTorch's own FileBackedData, from 1.5 on
                part.write_to_file(outfile)
            else:
                _write_all(outfile, memoryview(part))


def _write_all(outfile: BinaryWriter, data: memoryview) -> None:
    """An unbuffered file may take a part; other kinds take all, and some of them return nothing."""
    while data:
        written = outfile.write(data)
        if written == 0:
            raise OSError(errno.EIO, "a write of several bytes wrote none")
        data = data[len(data) if written is None else written :]


class LoweredBackendModule(StockModule):  # type: ignore[misc]
    """ExecuTorch's class, by the name that it is told by, for a payload or named data that lie on disk.

    ``processed_bytes`` and ``named_data_store_output`` are of real bytes, because C code may read them; but for those
    who pass them on, or look only at their type.  Copies: all of them, into memory.
    """

    @property
    def processed_bytes(self) -> bytes:
        placeholder: HeldBytes = self._processed_bytes
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == VERIFIER or (caller == EMITTER and active() is not None):
            return placeholder
        return bytes(placeholder)

    @property
    def named_data_store_output(self) -> Any:
        output = self._named_data_store_output
        caller = sys._getframe(1).f_globals.get("__name__")
        if output is None or caller == COLLECTOR or (caller == MODULE and active() is not None):
            return output
        return dataclasses.replace(output, buffers=[_real(buffer) for buffer in output.buffers])

    def __deepcopy__(self, memo: dict[int, Any] | None) -> LoweredBackendModule:
        copied = super().__deepcopy__(memo)
        copied.__class__ = type(self)
        return copied  # type: ignore[no-any-return]


def cord(export: Export, stock: Callable[..., Any], data: Any = None) -> StreamedCord:
    """In place of ``Cord(data)``."""
    return StreamedCord(data)


def _init_module(
    export: Export, stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> None:
    stock(self, *args, **kwargs)
    named = self._named_data_store_output
    held = [self._processed_bytes, *(() if named is None else named.buffers)]
    if any(held_in(data) is not None for data in held):
        self.__class__ = LoweredBackendModule


def _real(data: Any) -> Any:
    held = held_in(data)
    return data if held is None else held.read(0, held.nbytes)


def _serialize_program(
    export: Export,
    stock: Callable[..., Any],
    pte_file: Any,
    *,
    segment_alignment: int = 128,
    **kwargs: Any,
) -> Any:
    """As ExecuTorch; on pages, if that was asked for, what is mapped: delegates' payloads, and data that they share."""
    if export.alignment == "page":
        segment_alignment = math.lcm(segment_alignment, PAGE_NBYTES)
    return stock(
        pte_file,
        segment_alignment=segment_alignment,
        **kwargs,
    )


def _coerce_bytes(export: Export, stock: Callable[..., Any], data: Any) -> bytes:
    """What a flatbuffer takes in line: bytes that are copied in C."""
    return bytes(data) if isinstance(data, HeldBytes) else stock(data)


_SERIALIZE = (
    "(pte_file, *, extract_delegate_segments=False, segment_alignment=128, constant_tensor_alignment=None, "
    "delegate_alignment=None)"
)

HOOKS = (
    Hook("executorch.exir._serialize._program", "Cord", cord),
    Hook(
        "executorch.exir._serialize._serialize",
        "serialize_pte_binary",
        _serialize_program,
        signature=_SERIALIZE,
    ),
    Hook(MODULE, "_serialize_pte_binary", _serialize_program, signature=_SERIALIZE),
    Hook("executorch.exir._serialize._flatbuffer_program", "_coerce_bytes", _coerce_bytes),
    Hook(
        MODULE,
        "LoweredBackendModule.__init__",
        _init_module,
        signature="(self, edge_program, backend_id, processed_bytes, compile_specs, named_data_store_output=None)",
    ),
)
