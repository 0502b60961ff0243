"""Caches in which torch and ExecuTorch keep what they have seen of an export, for as long as the process lasts.

Through nodes of its graph, or as arguments of operators, lowered modules are among it, and with those all that lies on
disk for them.

Imports torch and ExecuTorch: only a block of ``streaming_constants`` imports this.
"""

from __future__ import annotations

from executorch.exir.backend import utils
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["forget"]


def forget() -> None:
    """Empty these caches.  They save time and nothing else, so that other threads' exports may be going on."""
    FakeTensorMode.cache_clear()
    clear = getattr(utils.is_same_node, "cache_clear", None)  # no cache any more: nothing to empty
    if clear is not None:
        clear()
