"""Packs and raw payloads, inspected."""

from __future__ import annotations

from collections.abc import Iterator

from stream_pack.format.front import KINDS
from stream_pack.inspection.inspection import InspectedPart, Inspection
from stream_pack.inspection.rows import rows_of
from stream_pack.reader.pack import Pack

__all__ = ["inspect_pack"]


def inspect_pack(pack: Pack) -> Inspection:
    """Inspect an open pack, or raw payload.  No byte of the region is read."""
    contents = pack._contents
    index = contents.index
    raw = pack.kind != "pack"
    return Inspection(
        path=pack.path,
        kind=pack.kind,
        nbytes=contents.nbytes,
        tensors_nbytes=int(index.tensor_nbytes.sum()),
        metadata=pack.metadata,
        alignment=None if raw else (index.alignment.small, index.alignment.large),
        block_nbytes=None if raw else index.block_nbytes,
        head=None if raw else pack._head.kind.name,
        checksum=None if raw else pack.checksum,
        rows=tuple(rows_of(index, contents.region_file_offset, contents.faults)),
        parts=tuple(_parts(pack)),
    )


def _parts(pack: Pack) -> Iterator[InspectedPart]:
    contents = pack._contents
    index = contents.index
    if pack.kind == "pack":
        head = pack._head
        index_end = head.index_file_offset + head.index_nbytes
        yield InspectedPart("header", head.kind.header_nbytes)
        # The graph with the few zeros that align the index: that of an MPS payload does not say where it ends.
        yield InspectedPart("graph", head.index_file_offset - head.kind.header_nbytes)
        yield InspectedPart("index", head.index_nbytes)
        yield InspectedPart(
            "head padding", head.region_file_offset - head.locator_nbytes - index_end
        )
        yield InspectedPart("locator", head.locator_nbytes)
    else:
        nbytes = KINDS[pack.kind].header_nbytes
        yield InspectedPart("header", nbytes)
        yield InspectedPart("graph", contents.region_file_offset - nbytes)
    stored = int(index.buffer_nbytes.sum())
    yield InspectedPart("tensors", stored)
    yield InspectedPart("region padding", contents.region_nbytes - stored)
    if pack.kind == "pack":
        yield InspectedPart("checksums", index.checksums_nbytes)
        yield InspectedPart("footer", pack._head.pack_nbytes - pack._head.footer_file_offset)
