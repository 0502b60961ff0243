"""The header: the first bytes of a pack, which say where the region is.

There is a kind for each reader of ExecuTorch that a pack can be made for, and a pack of one kind differs from another
in nothing but its header and its graph.  All that is particular to a kind is one :class:`HeadKind`, at the end of the
module of its graph; :mod:`stream_pack.format.header_kinds` lists them.
Source: docs/FORMAT.md, "Header".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.index import Index
from stream_pack.format.ragged import Ragged

__all__ = ["HeadKind", "Header", "To", "types_and_dims"]

To: TypeAlias = Literal["mps", "xnnpack", "ptd"]
"""The name of a :class:`HeadKind`."""


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A header and the flatbuffer that goes with it, the graph: all that is particular to them."""

    name: To
    """What callers say."""
    raw: str
    """A file of ExecuTorch's own that begins with this header, in words."""
    pack_as: str
    """What ExecuTorch takes a pack for, in words."""
    magic: bytes
    magic_at: int
    """File offset of ``magic``."""
    header_nbytes: int
    zeros: tuple[int, int]
    """The half-open range of file offsets that is the header's padding."""
    graph_file_offset: int
    """Where the flatbuffer starts."""
    before_graph_nbytes: int
    """Where the flatbuffer ends, less its length."""
    tables: tuple[int, int]
    """Tables of a plain graph that a C++ verifier visits: for each tensor, and besides."""
    says_dim_order: bool
    """Whether the graph has a dim order for each tensor."""
    unpack: Callable[[bytes], Header]
    """Read a header of at least ``header_nbytes`` bytes; no bound is checked.  Raises: FormatError."""
    pack: Callable[[bytes, int, int], tuple[bytes | memoryview, ...]]
    """Header and graph as they are in the file, from graph, region file offset and region nbytes.

    In pieces, without a copy of the graph.  Raises: LimitError."""
    encode: Callable[[Index], bytes]
    """The graph of a plain pack: it describes the tensors and no more."""
    disagreements: Callable[[memoryview, Index], NDArray[np.bool_]]
    """Which tensors of the index a graph describes otherwise.

    Raises: FormatError when it cannot be read, or does not describe all of them."""

    def __repr__(self) -> str:
        return f"<HeadKind {self.name}>"


@dataclass(frozen=True, slots=True)
class Header:
    """Where graph and region are.

    ``graph_nbytes`` is None where the header does not say it (mps).  For a .ptd it counts from the file's first byte:
    the bytes ``[0, graph_nbytes)`` of the file are a flatbuffer with the header as a gap.

    Units: bytes; file offsets count from the pack's first byte.
    """

    kind: HeadKind
    region_file_offset: int
    region_nbytes: int
    graph_file_offset: int
    graph_nbytes: int | None


def types_and_dims(
    index: Index, numbers: Mapping[str, int], *, none: int
) -> tuple[NDArray[np.int16], Ragged[np.int32]]:
    """What a graph says of each tensor: the number of its type, by the dtype's name, and its dims.

    It says ``none``, and no dims, where a dtype has no number there, or a dim is above 2**31 - 1.
    """
    dims = index.ragged_dims
    table = np.array([numbers.get(name, none) for name in index.dtype_names], np.int16)
    types = table[index.tensor_dtypes]
    types[dims.rows[dims.values > 2**31 - 1]] = none
    said = types != none
    ranks = np.where(said, dims.lengths, 0)
    return types, Ragged.of(dims.take(said).values.astype(np.int32), ranks)
