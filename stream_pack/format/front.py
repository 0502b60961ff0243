"""The front of a pack: which header it begins with, and the flatbuffer that goes with it.

A plain front describes the tensors and no more, so that a pack stands by itself.  Who builds a payload brings a front
whose flatbuffer holds a delegate's graph as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import OptionError
from stream_pack.format import graph_mps, graph_ptd, graph_xnnpack
from stream_pack.format.header import HeadKind
from stream_pack.format.index import Index
from stream_pack.format.limits import VERIFIER_TABLES

__all__ = ["MPS", "PTD", "XNNPACK", "Front", "disagreements", "plain_front", "verifier_tensors"]

Disagreements: TypeAlias = Callable[[memoryview, Index], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Front:
    """A header, and what makes the flatbuffer beside it.

    ``encode`` is called once, when the layout is known.  What it returns must say of every tensor of the index what
    docs/FORMAT.md has it say, in section 4; what else it says is its own affair.  It may raise LimitError and
    SourceError.
    """

    kind: HeadKind
    encode: Callable[[Index], bytes]


MPS = Front(HeadKind.MPS, graph_mps.encode)
XNNPACK = Front(HeadKind.XNNPACK, graph_xnnpack.encode)
PTD = Front(HeadKind.PTD, graph_ptd.encode)

_PLAIN = {front.kind.value: front for front in (MPS, XNNPACK, PTD)}
_DISAGREEMENTS: dict[HeadKind, Disagreements] = {
    HeadKind.MPS: graph_mps.disagreements,
    HeadKind.XNNPACK: graph_xnnpack.disagreements,
    HeadKind.PTD: graph_ptd.disagreements,
}
# Tables that a verifier visits in a plain front: for each tensor, and besides.
_TABLES = {
    HeadKind.MPS: (2, 2),  # the value, and the buffer that all share; root and constant segment
    HeadKind.XNNPACK: (1, 2),  # constant; root and the reserved constant
    HeadKind.PTD: (3, 1),  # name, layout and segment; root
}


def plain_front(to: object) -> Front:
    """The front that describes the tensors and no more; ``to`` is ``"mps"``, ``"xnnpack"`` or ``"ptd"``.

    Raises: OptionError.
    """
    front = _PLAIN.get(to) if isinstance(to, str) else None
    if front is None:
        raise OptionError(f"to={to!r}: expected {', '.join(map(repr, _PLAIN))}")
    return front


def disagreements(kind: HeadKind, data: memoryview, index: Index) -> NDArray[np.bool_]:
    """Of which tensors of ``index`` the flatbuffer ``data`` says something else.

    Raises: FormatError when it cannot be read, or says nothing of some.
    """
    return _DISAGREEMENTS[kind](data, index)


def verifier_tensors(kind: HeadKind) -> int:
    """How many tensors a plain front may have before C++ verifiers with default limits refuse it."""
    each, besides = _TABLES[kind]
    return (VERIFIER_TABLES - besides) // each
