"""Caches in which torch and ExecuTorch keep parts of an export for as long as the process lasts.

Through nodes of its graph, or as arguments of operators, they keep lowered modules, and so the disk space of those.

Imports torch and ExecuTorch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

from executorch.exir.backend import utils
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["clear_caches"]


def clear_caches() -> None:
    """Empty these caches.  They only save time, so other threads may be exporting meanwhile."""
    FakeTensorMode.cache_clear()
    clear = getattr(utils.is_same_node, "cache_clear", None)  # None in a version without this cache
    if clear is not None:
        clear()
