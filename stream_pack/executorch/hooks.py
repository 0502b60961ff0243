"""All that a block of ``streaming_constants`` replaces.  Imports torch and ExecuTorch."""

from __future__ import annotations

from stream_pack.executorch import (
    stream_copies,
    stream_emitter,
    stream_memory,
    stream_mps,
    stream_named_data,
    stream_program,
    stream_xnnpack,
)

__all__ = ["HOOKS"]

HOOKS = (
    *stream_copies.HOOKS,
    *stream_memory.HOOKS,
    *stream_mps.HOOKS,
    *stream_xnnpack.HOOKS,
    *stream_named_data.HOOKS,
    *stream_emitter.HOOKS,
    *stream_program.HOOKS,
)
