"""All that a block of ``streaming_constants`` replaces.  Imports torch and ExecuTorch."""

# ruff: noqa: I001
from __future__ import annotations

from stream_pack.executorch.export import (
    hooks_copies as stream_copies,
    hooks_emitter as stream_emitter,
    hooks_memory as stream_memory,
    hooks_mps as stream_mps,
    hooks_named_data as stream_named_data,
    hooks_program as stream_program,
    hooks_xnnpack as stream_xnnpack,
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
