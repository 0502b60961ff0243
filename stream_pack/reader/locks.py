"""Locks that a forked child finds free, although a thread of its parent may have held them."""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["Locked"]

_ALL: weakref.WeakSet[Locked] = weakref.WeakSet()


class Locked:
    """Something with a lock of its own, ``self._lock``.

    Only the thread that forks goes on in the child.  What another one was doing stays undone there, and a lock that it
    held would be held for ever: workers of a DataLoader, which read packs that were opened before, would wait for it.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer that closes the pack may run wherever memory is allocated.
        self._lock = threading.RLock()
        _ALL.add(self)

    def _forked(self) -> None:
        """Forget, in a child, what other threads were doing."""
        self._lock = threading.RLock()


def _renew() -> None:
    for locked in tuple(_ALL):  # a finalizer may make or drop some meanwhile
        locked._forked()


os.register_at_fork(after_in_child=_renew)
