"""The streamed export of the current thread, if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stream_pack.executorch.export.held import Holder

__all__ = ["Export", "SegmentAlignment", "activate", "active"]

SegmentAlignment: TypeAlias = Literal["page", "stock"]
"""Where constants begin in a program: on pages, or where ExecuTorch places them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """One block of :func:`stream_pack.executorch.streaming_constants`.

    ``state`` belongs to the modules that replace ExecuTorch's functions, an entry for each, under its name.
    ``refresh`` hooks modules that have been imported since.  ``ended``: the block was left, though a copied context may
    still refer to it.
    """

    holder: Holder
    alignment: SegmentAlignment
    state: dict[str, Any] = field(default_factory=dict)
    refresh: Callable[[], None] = lambda: None
    ended: bool = False


_ACTIVE: ContextVar[Export | None] = ContextVar("stream_pack_export", default=None)


def active() -> Export | None:
    """The export of the innermost block that this thread (or task) is in."""
    export = _ACTIVE.get()
    return None if export is None or export.ended else export


@contextlib.contextmanager
def activate(export: Export) -> Iterator[None]:
    """Make ``export`` the active one of this context."""
    token = _ACTIVE.set(export)
    try:
        yield
    finally:
        export.ended = True
        _ACTIVE.reset(token)
