"""What happens when an object is collected, without running any Python code.

Python raises a Ctrl-C in the next Python function that starts.  Where that is a finalizer, the exception is printed
and lost, and what the finalizer was for is not done.  So the finalizers here consist of functions that are written in
C, and the Ctrl-C is raised in the code that dropped the object.

They do nothing once the interpreter is shutting down, and in a forked child.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable
from operator import methodcaller

__all__ = ["Finalizer", "cancel", "keep_while", "when_collected"]


class Finalizer(weakref.ref[object]):
    """A weak reference that is a key of its own, whether or not its object can be hashed."""

    __slots__ = ("call",)
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    call: Callable[[], object]


class _Finalizers:
    """``calls``: references whose object, when it is collected, has its ``call`` called; ``kept``: what others keep."""

    def __init__(self) -> None:
        self.kept: dict[Finalizer, object] = {}
        self.calls: set[Finalizer] = set()
        self._sweep_at = 64
        # A reference that is gone itself does nothing when its object goes.
        atexit.register(self.calls.clear)
        os.register_at_fork(after_in_child=self.calls.clear)

    def add(self, ref: Finalizer) -> None:
        if len(self.calls) >= self._sweep_at:
            for known in self.calls.copy():
                if known() is None:
                    self.calls.discard(known)
            self._sweep_at = 2 * len(self.calls) + 64
        self.calls.add(ref)


@functools.cache
def _finalizers() -> _Finalizers:
    return _Finalizers()


def when_collected(holder: object, call: Callable[[], object]) -> Finalizer:
    """Call ``call``, which must be written in C, when ``holder`` is collected."""
    ref = Finalizer(holder, methodcaller("call"))
    ref.call = call
    _finalizers().add(ref)
    return ref


def cancel(finalizer: Finalizer) -> None:
    """Undo :func:`when_collected`, as soon as the caller has dropped ``finalizer``."""
    _finalizers().calls.discard(finalizer)


def keep_while(holder: object, value: object) -> None:
    """Keep ``value`` until ``holder`` is collected."""
    kept = _finalizers().kept
    kept[Finalizer(holder, kept.pop)] = value
