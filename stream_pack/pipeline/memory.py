"""The memory of this process, as reported by the system and managed by the C library."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

__all__ = ["anonymous_nbytes", "trim_heap"]


def trim_heap() -> None:
    """Have the C library return free memory to the system.

    How much of it stays resident is chance; without this, one run finds that it needs tens of MB more than another.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def anonymous_nbytes() -> int:
    """Resident anonymous memory of this process now; where the system does not tell, its peak of all resident pages."""
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:  # macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    _, _, rest = status.partition(b"RssAnon:")
    return int(rest.split(maxsplit=1)[0]) * 1024
