"""The public function: any file that this package reads in place, inspected; and what fills an open pack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from stream_pack.format.header_kinds import KINDS
from stream_pack.inspection.inspection import InspectedPart, Inspection
from stream_pack.inspection.of_et_file import inspect_et_file
from stream_pack.inspection.rows import rows_of
from stream_pack.metal.plan import plan_metal
from stream_pack.reader.pack import Pack
from stream_pack.reader.pack import open as open_pack

__all__ = ["inspect", "inspect_pack"]


def inspect(path: str | os.PathLike[str], *, offset: int = 0, nbytes: int | None = None) -> Inspection:
    """Describe a pack, or a program, raw payload or data file of ExecuTorch's: what ``stream-pack inspect`` prints.

    ``offset`` and ``nbytes`` say where it is inside another file, as for :func:`stream_pack.open`.  No byte of a tensor
    is read, so damage in one is not seen: :func:`stream_pack.verify` finds that.

    Units: bytes; ``offset`` counts from the file's first byte.
    Raises: OSError; OptionError; NotAPackError, NewerVersionError, TruncatedError, TrailingBytesError, FormatError,
    ChecksumError (of the head).
    """
    inspection = inspect_et_file(path, offset=offset, nbytes=nbytes)
    if inspection is None:
        with open_pack(path, offset=offset, nbytes=nbytes) as pack:
            inspection = replace(inspect_pack(pack), metal=plan_metal(pack).summary())
    return inspection


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
        rows=tuple(rows_of(index, contents.region_file_offset, contents.faults, contents.dim_orders)),
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
        yield InspectedPart("head padding", head.region_file_offset - head.locator_nbytes - index_end)
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
