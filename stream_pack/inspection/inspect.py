"""The public function: anything that this package reads, inspected; and what fills an open pack."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from stream_pack.arguments.jobs import check_number
from stream_pack.arguments.paths import require_path
from stream_pack.errors import OptionError
from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, sniff
from stream_pack.format.head import Head
from stream_pack.format.header_kinds import KINDS
from stream_pack.format.index import PACK_NOTE
from stream_pack.inspection.inspection import InspectedPart, Inspection
from stream_pack.inspection.of_et_file import inspect_et_file
from stream_pack.inspection.rows import rows_of
from stream_pack.metal.plan import plan_metal
from stream_pack.reader.pack import Pack
from stream_pack.reader.pack import open as open_pack

if TYPE_CHECKING:
    from stream_pack.pickles.nesting import Key
    from stream_pack.sources.open import Convertible

__all__ = ["inspect", "inspect_pack"]

_CHECKPOINTS = frozenset({Kind.TORCH_ZIP, Kind.TORCH_LEGACY, Kind.SAFETENSORS, Kind.GGUF})


def inspect(
    source: Convertible, *, offset: int = 0, nbytes: int | None = None, key: Key = None, ignore_unknown: bool = False
) -> Inspection:
    """Describe anything that :func:`stream_pack.convert` takes, from its head alone: what ``stream-pack inspect``
    prints.

    ``source``, ``key`` and ``ignore_unknown``: as for :func:`stream_pack.convert`.  ``offset``: where in the file at
    the path ``source`` to begin; ``nbytes``: of a pack in another file, as for :func:`stream_pack.open`.

    No byte of a tensor is read, and only the head of a pipe, so damage in a tensor is not seen:
    :func:`stream_pack.verify` finds that in a pack.  A tensor that cannot be packed is no error, but listed.

    Units: bytes; ``offset`` counts from the file's first byte.
    Raises: OSError; OptionError; SourceError and its kinds; NotAPackError, NewerVersionError, TruncatedError,
    TrailingBytesError, FormatError, ChecksumError (of the head).
    """
    if not isinstance(source, (str, os.PathLike)):
        if offset or nbytes is not None:
            raise OptionError("offset= and nbytes= need a path")
        return _inspect_source(source, "", offset=0, key=key, ignore_unknown=ignore_unknown)
    require_path("source", source, "source")
    check_number("offset", offset, least=0)
    if key is None and _is_read_in_place(source, offset):
        inspection = inspect_et_file(source, offset=offset, nbytes=nbytes)
        if inspection is None:
            with open_pack(source, offset=offset, nbytes=nbytes) as pack:
                inspection = replace(inspect_pack(pack), metal=plan_metal(pack).summary())
        return inspection
    if nbytes is not None:
        raise OptionError("nbytes= is for packs and ExecuTorch's files: another source ends where its file does")
    from stream_pack.sources.open import FileAt

    path = os.fsdecode(source)
    return _inspect_source(
        FileAt(path, offset) if offset else source,
        os.path.abspath(path),
        offset=offset,
        key=key,
        ignore_unknown=ignore_unknown,
    )


def inspect_pack(pack: Pack) -> Inspection:
    """Inspect an open pack, or raw payload.  No byte of the region is read."""
    if pack.kind == "pack":
        return replace(_inspect_head(pack._head, pack.path), checksum=pack.checksum)
    contents = pack._contents
    index = contents.index
    header_nbytes = KINDS[pack.kind].header_nbytes
    return Inspection(
        path=pack.path,
        kind=pack.kind,
        nbytes=contents.nbytes,
        tensors_nbytes=int(index.tensor_nbytes.sum()),
        metadata=pack.metadata,
        checksums="none",
        rows=tuple(rows_of(index, contents.region_file_offset, contents.faults, contents.dim_orders)),
        parts=(
            InspectedPart("header", header_nbytes),
            InspectedPart("graph", contents.region_file_offset - header_nbytes),
            *_region(int(index.buffer_nbytes.sum()), contents.region_nbytes),
        ),
    )


def _is_read_in_place(path: str | os.PathLike[str], offset: int) -> bool:
    """Whether it is a file that is inspected without a source, or one that nothing reads: both say so best there."""
    from stream_pack.sources.sets.hugging_face import is_index_name

    if not stat.S_ISREG(os.stat(path).st_mode) or is_index_name(os.path.basename(os.fsdecode(path))):
        return False
    with open(path, "rb", buffering=0) as file:
        return sniff(os.pread(file.fileno(), SNIFF_NBYTES, offset)) not in _CHECKPOINTS


def _inspect_source(source: Convertible, path: str, *, offset: int, key: Key, ignore_unknown: bool) -> Inspection:
    from stream_pack.inspection.of_source import inspect_source
    from stream_pack.sources.open import open_source
    from stream_pack.sources.pack.source import PackSource

    with open_source(source, key=key, ignore_unknown=ignore_unknown) as opened:
        if isinstance(opened, PackSource):
            return _inspect_head(opened.head, path)
        return inspect_source(opened, path, offset=offset)


def _inspect_head(head: Head, path: str) -> Inspection:
    """What the head of a pack says, which is all but the root checksum."""
    index = head.index
    return Inspection(
        path=path,
        kind="pack",
        nbytes=head.pack_nbytes,
        tensors_nbytes=int(index.tensor_nbytes.sum()),
        metadata=index.notes(PACK_NOTE),
        checksums="XXH3-64 of each block",
        alignment=(index.alignment.small, index.alignment.large),
        block_nbytes=index.block_nbytes,
        head=head.kind.name,
        rows=tuple(rows_of(index, head.region_file_offset, {}, {})),
        parts=tuple(_parts(head)),
    )


def _parts(head: Head) -> Iterator[InspectedPart]:
    index = head.index
    index_end = head.index_file_offset + head.index_nbytes
    yield InspectedPart("header", head.kind.header_nbytes)
    # The graph with the few zeros that align the index: that of an MPS payload does not say where it ends.
    yield InspectedPart("graph", head.index_file_offset - head.kind.header_nbytes)
    yield InspectedPart("index", head.index_nbytes)
    yield InspectedPart("head padding", head.region_file_offset - head.locator_nbytes - index_end)
    yield InspectedPart("locator", head.locator_nbytes)
    yield from _region(int(index.buffer_nbytes.sum()), head.region_nbytes)
    yield InspectedPart("checksums", index.checksums_nbytes)
    yield InspectedPart("footer", head.pack_nbytes - head.footer_file_offset)


def _region(stored: int, nbytes: int) -> Iterator[InspectedPart]:
    yield InspectedPart("tensors", stored)
    yield InspectedPart("region padding", nbytes - stored)
