"""All that a block of ``streaming_constants`` replaces, and clears at its end.  Imports torch and ExecuTorch."""

from __future__ import annotations

from executorch.exir.backend import utils
from torch._subclasses.fake_tensor import FakeTensorMode

from stream_pack.executorch.export import (
    hooks_copies,
    hooks_memory,
    hooks_mps,
    hooks_named_data,
    hooks_program,
    hooks_xnnpack,
)

__all__ = ["HOOKS", "clear_caches"]

HOOKS = (
    *hooks_copies.HOOKS,
    *hooks_memory.HOOKS,
    *hooks_mps.HOOKS,
    *hooks_xnnpack.HOOKS,
    *hooks_named_data.HOOKS,
    *hooks_program.HOOKS,
)


def clear_caches() -> None:
    """Empty the caches in which torch and ExecuTorch keep parts of an export for as long as the process lasts.

    Through nodes of its graph, or as arguments of operators, they keep lowered modules, and so the disk space of these.
    They only save time, so other threads may be exporting meanwhile.
    """
    FakeTensorMode.cache_clear()
    clear = getattr(utils.is_same_node, "cache_clear", None)  # None in a version without this cache
    if clear is not None:
        clear()
