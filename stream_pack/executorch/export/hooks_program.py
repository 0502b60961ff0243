"""Program files with constants on disk: ExecuTorch assembles references to them.

Imports ExecuTorch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import sys
from typing import Any

from executorch.exir._serialize._cord import Cord
from executorch.exir.lowered_backend_module import LoweredBackendModule as StockModule

from stream_pack.executorch.export.held import Held
from stream_pack.executorch.export.patching import Hook, Stock
from stream_pack.executorch.export.placeholder import HeldBytes, held_in
from stream_pack.executorch.export.session import Export, active
from stream_pack.format.align import PAGE_NBYTES
from stream_pack.writer.sink import BinaryWriter

__all__ = ["HOOKS", "StreamedCord", "cord"]

EMITTER = "executorch.exir.emit._emitter"
"""In a block, passes a payload on to code that takes placeholders."""
COLLECTOR = "executorch.exir.program._program"
"""Collects shared data in one store, which takes placeholders in a block, and refuses them after it."""
MODULE = "executorch.exir.lowered_backend_module"
"""Makes a program of one delegate."""
VERIFIER = "torch._export.verifier"
"""Checks a payload's type whenever a program is made or copied."""


class StreamedCord(Cord):  # type: ignore[misc]
    """ExecuTorch's ``Cord``, whose parts may be on disk: ``_buffers`` has a :class:`Held` for each placeholder.

    It remains valid after the block, whatever a program manager does with it.
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
    """An unbuffered file may take a part; other files take all, and some of them return None."""
    while data:
        written = outfile.write(data)
        if written == 0:
            raise OSError(errno.EIO, "a write of several bytes wrote none")
        data = data[len(data) if written is None else written :]


class LoweredBackendModule(StockModule):  # type: ignore[misc]
    """ExecuTorch's class, under its name, by which other code recognises it, for a payload or named data on disk.

    ``processed_bytes`` and ``named_data_store_output`` have real bytes, because C code may read them, except for the
    callers above, which only pass them on or check their type.  Copies: all of the bytes, into memory.
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


def cord(export: Export, stock: Stock, data: Any = None) -> StreamedCord:
    """Replaces ``Cord(data)``."""
    return StreamedCord(data)


def _init_module(export: Export, stock: Stock, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    named = self._named_data_store_output
    held = [self._processed_bytes, *(() if named is None else named.buffers)]
    if any(held_in(data) is not None for data in held):
        self.__class__ = LoweredBackendModule


def _real(data: Any) -> Any:
    held = held_in(data)
    return data if held is None else held.read(0, held.nbytes)


def _serialize_program(
    export: Export, stock: Stock, pte_file: Any, *, segment_alignment: int = 128, **kwargs: Any
) -> Any:
    """Like ExecuTorch's; with alignment ``"page"``, segments (payloads and shared data) begin on pages."""
    if export.alignment == "page":
        segment_alignment = math.lcm(segment_alignment, PAGE_NBYTES)
    return stock(pte_file, segment_alignment=segment_alignment, **kwargs)


def _coerce_bytes(export: Export, stock: Stock, data: Any) -> bytes:
    """Real bytes for what is copied into a flatbuffer, in C."""
    return bytes(data) if isinstance(data, HeldBytes) else stock(data)


_SERIALIZE = (
    "(pte_file, *, extract_delegate_segments=False, segment_alignment=128, constant_tensor_alignment=None, "
    "delegate_alignment=None)"
)

HOOKS = (
    Hook("executorch.exir._serialize._program", "Cord", cord),
    Hook("executorch.exir._serialize._serialize", "serialize_pte_binary", _serialize_program, signature=_SERIALIZE),
    Hook(MODULE, "_serialize_pte_binary", _serialize_program, signature=_SERIALIZE),
    Hook("executorch.exir._serialize._flatbuffer_program", "_coerce_bytes", _coerce_bytes),
    Hook(
        MODULE,
        "LoweredBackendModule.__init__",
        _init_module,
        signature="(self, edge_program, backend_id, processed_bytes, compile_specs, named_data_store_output=None)",
    ),
)
