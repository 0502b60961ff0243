"""A safetensors file as a source, from a file or a pipe, without the safetensors package.

Source: https://github.com/huggingface/safetensors, "Format": u64 header nbytes, header (JSON), data.  The rules are
those of its ``validate``, and one more that its specification has and its reader does not check: no duplicate keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

from stream_pack.errors import (
    LimitError,
    SourceError,
    StreamPackError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_SAFETENSORS
from stream_pack.format.file_kinds import MAX_SAFETENSORS_HEADER_NBYTES
from stream_pack.format.limits import MAX_NBYTES, MAX_RANK
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.data_section import DataSectionSource
from stream_pack.text import quoted

__all__ = ["JOIN_PIECES", "SafetensorsSource"]

HEADER_COPIES = 3
MEMBER_NBYTES = 150
ELEMENT_NBYTES = 40
"""Memory that the header takes while it is parsed: lengths of it, and for each colon and each comma (measured)."""

METADATA_KEY = "__metadata__"
PIECES_KEY = "DCP_SHARDING_INFO"
"""torch's ``HuggingFaceStorageWriter`` writes it into every file: where each "tensor" begins in the one that it may be
a piece of; not how long that is.  Source: torch/distributed/checkpoint/filesystem.py, ``_write_files_from_queue``."""

JOIN_PIECES = (
    "join the files of all ranks first, with torch's consolidate_safetensors_files (docs/troubleshooting.md shows "
    "how), or save with enable_consolidation=True"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the header; ``begin`` and ``end`` count bytes from the data's first.

    ``dtype``: None if no pack has it.
    """

    name: str
    dtype: int | None
    dtype_name: str
    shape: list[int]
    begin: int
    end: int


class SafetensorsSource(DataSectionSource):
    """The tensors of a safetensors file, by data offset, then name.

    Lifetime: owns ``stream``, positioned at the file's first byte.
    A tensor whose dtype has no place in a pack is refused if it is taken.

    ``pieces``: whether the file says that its tensors may be pieces of larger ones: None if not, else whether all begin
    where theirs do.  Such tensors are refused, but for those of a set that proves them whole.

    Raises: UnsupportedCheckpointError for a header that breaks a rule of the format, TruncatedSourceError; of a pipe's
    length, only :meth:`stream` can tell.
    """

    def __init__(self, stream: ByteStream, *, watch: MemoryWatch = UNLIMITED) -> None:
        entries, metadata = _parse(_read_header(stream, watch))
        self.pieces = _pieces(entries, metadata.pop(PIECES_KEY, None))
        data_nbytes = _check_offsets(entries)
        builder = CatalogBuilder()
        for entry in entries:
            if entry.dtype is None:
                builder.refuse(entry.name, _unknown_dtype(entry))
                continue
            try:
                nbytes = builder.add(entry.name, entry.dtype, entry.shape, storage=0, start=entry.begin)
            except (SourceError, LimitError) as error:
                builder.refuse(entry.name, error)
                continue
            if nbytes != entry.end - entry.begin:
                raise UnsupportedCheckpointError(
                    f"tensor {quoted(entry.name)} of shape {entry.shape} has {nbytes} bytes, but its data_offsets hold "
                    f"{entry.end - entry.begin}: the safetensors header is damaged"
                )
        super().__init__(
            stream,
            builder.build(storages_nbytes=data_nbytes, metadata=metadata),
            kind="safetensors",
            data_begin=stream.position,
            data_nbytes=data_nbytes,
        )
        if stream.file_nbytes is not None:
            self._check_end(stream.file_nbytes)

    def refuse(self, rows: Iterable[int]) -> None:
        taken = list(rows)
        if self.pieces is not None and taken:
            raise UnsupportedCheckpointError(
                f"the safetensors metadata holds {PIECES_KEY}: what the file has may be pieces of tensors, as each "
                f"rank of a distributed save writes its own, and nothing proves them whole; {JOIN_PIECES}"
            )
        super().refuse(taken)

    def _check_end_of_pipe(self) -> None:
        if not self._stream.at_end():
            self._check_end(None)

    def _check_end(self, nbytes: int | None) -> None:
        """``nbytes``: of the whole source; None: more than there may be."""
        expected = self._data_begin + self._data_nbytes
        if nbytes is not None and nbytes < expected:
            raise TruncatedSourceError(
                f"the source has {nbytes} bytes; its safetensors header announces {expected}: "
                f"{expected - nbytes} are missing"
            )
        if nbytes is None or nbytes > expected:
            raise UnsupportedCheckpointError(
                f"the safetensors data ends at byte {expected}, but more follows: trailing bytes, or two files joined"
            )


def _read_header(stream: ByteStream, watch: MemoryWatch) -> bytes:
    nbytes = int.from_bytes(stream.read_exactly(8, what="the length of the header"), "little")
    if nbytes > MAX_SAFETENSORS_HEADER_NBYTES:
        raise UnsupportedCheckpointError(
            f"not safetensors: its first 8 bytes would be a header of {nbytes} bytes, the limit is "
            f"{MAX_SAFETENSORS_HEADER_NBYTES}"
        )
    # The format wants "{" and nothing before it; seen first, so that no other file is read as a header.
    if nbytes < 2 or stream.peek(1) != b"{":
        raise UnsupportedCheckpointError(
            f"not safetensors: expected a JSON header that starts with '{{' at byte 8, found {quoted(stream.peek(8))}"
        )
    copies = HEADER_COPIES * nbytes
    watch.allow(copies)
    # In chunks: what a length claims is not allocated before it has come.
    header = b"".join(stream.chunks(nbytes, chunk_nbytes=1 << 20, what="the header"))
    objects = MEMBER_NBYTES * header.count(b":") + ELEMENT_NBYTES * header.count(b",")
    watch.allow(copies - nbytes + objects)
    return header


def _parse(header: bytes) -> tuple[list[_Entry], dict[str, str]]:
    """The tensors by data offset, then name, and the metadata; no relation between tensors is checked."""
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except StreamPackError:
        raise
    except (ValueError, RecursionError) as error:
        # ValueError: JSON and UTF-8 errors, and integers of more digits than Python converts.
        raise UnsupportedCheckpointError(
            f"the safetensors header is not JSON as the format wants it: {error}"
        ) from None
    metadata = parsed.pop(METADATA_KEY, None)
    entries = [_entry(name, value) for name, value in parsed.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.name))
    return entries, _check_metadata({} if metadata is None else metadata)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise UnsupportedCheckpointError(
            f"the safetensors header has the key {quoted(twice)} twice: readers disagree on which one counts"
        )
    return unique


def _refuse_constant(text: str) -> object:
    raise UnsupportedCheckpointError(f"the safetensors header holds {quoted(text)}, which is not JSON")


def _check_metadata(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise UnsupportedCheckpointError(
            f"the safetensors header's {METADATA_KEY} is a {type(metadata).__name__}, expected an object"
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise UnsupportedCheckpointError(
                f"the safetensors metadata {quoted(key)} is a {type(value).__name__}, expected text"
            )
    try:
        "".join(text for item in metadata.items() for text in item).encode()
    except UnicodeEncodeError:
        raise UnsupportedCheckpointError(
            "the safetensors metadata holds a lone surrogate, which no UTF-8 text can"
        ) from None
    return metadata


def _pieces(entries: list[_Entry], text: str | None) -> bool | None:
    """``pieces`` of the source, from the text under :data:`PIECES_KEY`.  What cannot be read is no proof."""
    if text is None:
        return None
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(told, dict):
        return False
    offsets = [
        told[entry.name].get("saved_offsets") if isinstance(told.get(entry.name), dict) else None for entry in entries
    ]
    return all(
        isinstance(begin, list) and len(begin) == len(entry.shape) and not any(begin)
        for begin, entry in zip(offsets, entries)
    )


def _entry(name: str, value: object) -> _Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not _are_lengths(shape)
        or not _are_lengths(offsets)
        or len(offsets) != 2
        or len(shape) > MAX_RANK
    ):
        raise UnsupportedCheckpointError(
            f"tensor {quoted(name)} in the safetensors header: expected a dtype, a shape of at most {MAX_RANK} "
            f"lengths, and two data_offsets, all numbers whole and from 0 to {MAX_NBYTES}"
        )
    return _Entry(name, BY_SAFETENSORS.get(dtype), dtype, shape, *offsets)


def _unknown_dtype(entry: _Entry) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"tensor {quoted(entry.name)} has the safetensors dtype {quoted(entry.dtype_name)}, which a pack cannot hold",
        tensor=entry.name,
    )


def _are_lengths(values: object) -> TypeGuard[list[int]]:
    # type() is int: True is an int to isinstance.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_NBYTES for value in values)


def _check_offsets(entries: list[_Entry]) -> int:
    """Prove that the tensors tile the data, without hole or overlap; returns its length in bytes."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise UnsupportedCheckpointError(
                f"tensor {quoted(entry.name)} has the data_offsets [{entry.begin}, {entry.end}], expected it to begin "
                f"at {position}, where the one before ends: the safetensors header has a hole, an overlap or damage"
            )
        position = entry.end
    return position
