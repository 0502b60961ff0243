"""The streamed export that is going on in this thread, if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stream_pack.executorch.export.held import Holder

__all__ = ["Alignment", "Export", "activate", "active"]

Alignment: TypeAlias = Literal["page", "stock"]
"""Where constants begin in a program: on pages, or where ExecuTorch has them begin."""


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """One block of :func:`stream_pack.executorch.streaming_constants`.

    ``state`` is for the modules that replace ExecuTorch's functions, each under its own name.  ``refresh`` hooks what
    has been imported since.  ``ended``: the block was left, whoever still holds a copy of its context.
    """

    holder: Holder
    alignment: Alignment
    state: dict[str, Any] = field(default_factory=dict)
    refresh: Callable[[], None] = lambda: None
    ended: bool = False


_ACTIVE: ContextVar[Export | None] = ContextVar("stream_pack_export", default=None)


def active() -> Export | None:
    """The export of the block that this thread (or task) is in: the innermost one."""
    export = _ACTIVE.get()
    return None if export is None or export.ended else export


@contextlib.contextmanager
def activate(export: Export) -> Iterator[None]:
    """Make ``export`` the one of this context, until left."""
    token = _ACTIVE.set(export)
    try:
        yield
    finally:
        export.ended = True
        _ACTIVE.reset(token)
