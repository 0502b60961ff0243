"""An MPS payload that is a pack, assembled from constants on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stream_pack.errors import UnsupportedTensorError
from stream_pack.et_files.mps_types import DTYPE_OF
from stream_pack.executorch.export.held import Held
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.head import encode_footer, encode_head
from stream_pack.format.header_kinds import KINDS, Front
from stream_pack.format.layout import Layout, Policy, plan
from stream_pack.pipeline.chunks import Zeros
from stream_pack.text import quoted

__all__ = ["HeldConstant", "Region", "assemble", "plan_region"]


@dataclass(frozen=True, slots=True)
class HeldConstant:
    """Value ``id`` of a graph: ``datatype`` is an MPSDataType, ``shape`` what the graph says."""

    id: int
    name: str
    datatype: int
    shape: tuple[int, ...]
    held: Held


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Where the constants are: ``offsets`` in their order; ``buffers``, the contents of the region.

    Units: bytes, from the region's first.
    """

    layout: Layout
    offsets: tuple[int, ...]
    buffers: tuple[Held, ...]

    def __len__(self) -> int:
        return self.layout.region_nbytes


def plan_region(constants: Sequence[HeldConstant]) -> Region:
    """Lay out the constants.  Those with equal contents share their bytes.

    Raises: UnsupportedTensorError when a constant's length is not that of its shape; LimitError.
    """
    builder = CatalogBuilder()
    storages: dict[tuple[bytes, int], int] = {}
    names: set[str] = set()
    for constant in constants:
        held = constant.held
        storage = storages.setdefault((held.digest, held.nbytes), len(storages))
        name = constant.name if constant.name not in names else f"{constant.name} ({constant.id})"
        names.add(name)
        dtype = DTYPE_OF[constant.datatype]
        nbytes = builder.add(name, dtype, constant.shape, storage=storage, start=0)
        if nbytes != held.nbytes:
            raise UnsupportedTensorError(
                f"constant {quoted(name)} has {held.nbytes} bytes, but shape {list(constant.shape)} of MPSDataType "
                f"{constant.datatype} takes {nbytes}: export with alignment='stock'",
                tensor=name,
            )
    by_storage = {storages[c.held.digest, c.held.nbytes]: c.held for c in constants}
    stored_nbytes = sum(held.nbytes for held in by_storage.values())
    layout = plan(builder.build(storages_nbytes=stored_nbytes), Policy())
    return Region(
        layout,
        tuple(layout.index.offset(tensor) for tensor in range(len(constants))),
        tuple(by_storage[storage] for storage in layout.buffer_storages.tolist()),
    )


def assemble(region: Region, graph: bytes) -> Held:
    """The pack that begins with ``graph``, the flatbuffer that describes ``region``.  Copies: none of the constants."""
    encoded = encode_head(region.layout, Front(KINDS["mps"], lambda index: graph))
    blocks = [checksum for held in region.buffers for checksum in held.block_checksums]
    checksums = np.array(blocks, "<u8").tobytes()
    padding = Zeros(encoded.padding_nbytes)
    members: list[Held | bytes | Zeros] = [encoded.front, padding, encoded.locator]
    end = 0
    offsets = region.layout.index.buffer_offsets.tolist()
    for offset, held in zip(offsets, region.buffers, strict=True):
        members += [Zeros(offset - end), held]
        end = offset + held.nbytes
    footer = encode_footer(encoded.head, checksums)
    members += [Zeros(region.layout.region_nbytes - end), checksums, footer]
    return Held.compose(members)
