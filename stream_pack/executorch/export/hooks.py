"""All that a block of ``streaming_constants`` replaces.  Imports torch and ExecuTorch."""

from __future__ import annotations

from stream_pack.executorch.export import (
    hooks_copies,
    hooks_emitter,
    hooks_memory,
    hooks_mps,
    hooks_named_data,
    hooks_program,
    hooks_xnnpack,
)

__all__ = ["HOOKS"]

HOOKS = (
    *hooks_copies.HOOKS,
    *hooks_memory.HOOKS,
    *hooks_mps.HOOKS,
    *hooks_xnnpack.HOOKS,
    *hooks_named_data.HOOKS,
    *hooks_emitter.HOOKS,
    *hooks_program.HOOKS,
)
