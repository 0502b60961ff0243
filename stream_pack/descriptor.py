"""Writing to a descriptor that somebody else may have made non-blocking."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

__all__ = ["write_some"]


def write_some(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Write the beginning of ``parts``, as much as the descriptor takes; returns how many bytes that was.

    A descriptor that takes nothing now is waited for: whoever shares the pipe or terminal may have made it
    non-blocking, as ssh does.
    Raises: OSError.
    """
    while True:
        try:
            return os.writev(descriptor, parts)
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()
