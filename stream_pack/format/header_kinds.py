"""The front of a pack: which header it begins with, and the flatbuffer that goes with it.

:data:`KINDS` lists the headers there are.  A plain front describes the tensors and no more, so that a pack can be used
by itself; a payload builder has a front whose flatbuffer also holds a delegate's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stream_pack.errors import NotAPackError, OptionError
from stream_pack.format import graph_mps, graph_ptd, graph_xnnpack
from stream_pack.format.header import Header, HeadKind
from stream_pack.format.index import Index
from stream_pack.format.limits import VERIFIER_TABLES

__all__ = [
    "KINDS",
    "MAX_HEADER_NBYTES",
    "MPS",
    "PTD",
    "XNNPACK",
    "Front",
    "decode_header",
    "kind_of",
    "plain_front",
    "verifier_tensors",
]


KINDS: dict[str, HeadKind] = {kind.name: kind for kind in (graph_mps.KIND, graph_xnnpack.KIND, graph_ptd.KIND)}
"""Every kind of header by name."""

MAX_HEADER_NBYTES = max(kind.header_nbytes for kind in KINDS.values())
"""First bytes of a file that are enough to decode any header."""


@dataclass(frozen=True, slots=True)
class Front:
    """A header, and what makes the flatbuffer beside it.

    ``encode`` is called once, when the layout is known.  What it returns must say of every tensor of the index what
    docs/FORMAT.md has it say, in section 4; it may say more.  It may raise LimitError and SourceError.
    """

    kind: HeadKind
    encode: Callable[[Index], bytes]


def plain_front(to: object) -> Front:
    """The front that describes the tensors and no more; ``to`` is ``"mps"``, ``"xnnpack"`` or ``"ptd"``.

    Raises: OptionError.
    """
    kind = KINDS.get(to) if isinstance(to, str) else None
    if kind is None:
        *others, last = map(repr, KINDS)
        raise OptionError(f"to={to!r}: expected {', '.join(others)} or {last}")
    return Front(kind, kind.encode)


MPS = plain_front("mps")
XNNPACK = plain_front("xnnpack")
PTD = plain_front("ptd")


def kind_of(start: bytes) -> HeadKind | None:
    """The kind of header that these first bytes claim; 12 of them decide."""
    return next((k for k in KINDS.values() if start.startswith(k.magic, k.magic_at)), None)


def decode_header(data: bytes) -> Header:
    """Read the header of a pack or raw payload from its first bytes (56 are enough).  No bound is checked here.

    Raises: NotAPackError when there are too few, or they carry no header's magic; FormatError.
    """
    kind = kind_of(data)
    least = min(k.header_nbytes for k in KINDS.values()) if kind is None else kind.header_nbytes
    if len(data) < least:
        raise NotAPackError(f"{len(data)} bytes are too few for a pack, whose header alone has {least}")
    if kind is None:
        magics = [
            f"{k.magic.hex(' ')} ({k.magic.lstrip(bytes(1)).decode()}) at byte {k.magic_at}" for k in KINDS.values()
        ]
        raise NotAPackError(
            f"not a pack: it begins with {data[:12].hex(' ')}, expected {', '.join(magics[:-1])} or {magics[-1]}"
        )
    return kind.unpack(data)


def verifier_tensors(kind: HeadKind) -> int:
    """How many tensors a plain front may have before C++ verifiers with default limits refuse it."""
    each, besides = kind.tables
    return (VERIFIER_TABLES - besides) // each
