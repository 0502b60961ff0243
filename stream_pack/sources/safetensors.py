"""A safetensors file as a source, from a file or a pipe, without the safetensors package.

Source: https://github.com/huggingface/safetensors, "Format": u64 header nbytes, header (JSON), data.  The rules are
those of its ``validate``, and one more that its specification has and its reader does not check: no duplicate keys.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from stream_pack.errors import (
    LimitError,
    SourceError,
    StreamPackError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BY_SAFETENSORS
from stream_pack.format.file_kinds import MAX_SAFETENSORS_HEADER_NBYTES
from stream_pack.format.limits import MAX_NBYTES, MAX_RANK
from stream_pack.format.rows import rows
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.data_section import DataSectionSource
from stream_pack.text import quoted

__all__ = ["JOIN_PIECES", "SafetensorsSource"]

MEMBER_NBYTES = 220
NAME_COPIES = 1
"""Memory that a header of many tensors takes beside its text until it is a catalog: for each, and how often their names
are held (measured)."""

MAX_VALUE_NCHARS = 4096
"""What no tensor's value is longer than, but by blanks."""

COLON_NBYTES = 150
COMMA_NBYTES = 40
"""Memory that a longer value takes at most, for each colon and each comma (measured)."""

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

    ``dtype``: a number in :data:`stream_pack.format.dtypes.DTYPES`, None if no pack has it.
    """

    name: str
    dtype_name: str
    shape: list[int]
    begin: int
    end: int

    @property
    def dtype(self) -> int | None:
        return BY_SAFETENSORS.get(self.dtype_name)


class _Entries:
    """The tensors of the header, as columns."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtype_names: list[str] = []
        self.dims = array("q")
        self.dims_ends = array("q")
        self.begins = array("q")
        self.ends = array("q")

    def add(self, entry: _Entry) -> None:
        self.names.append(entry.name)
        self.dtype_names.append(sys.intern(entry.dtype_name))
        self.dims.extend(entry.shape)
        self.dims_ends.append(len(self.dims))
        self.begins.append(entry.begin)
        self.ends.append(entry.end)

    def entry(self, row: int) -> _Entry:
        shape = self.dims[self.dims_ends[row - 1] if row else 0 : self.dims_ends[row]].tolist()
        return _Entry(self.names[row], self.dtype_names[row], shape, self.begins[row], self.ends[row])

    def in_order(self) -> Iterator[_Entry]:
        """By data offset, then name."""
        by_name = np.array(sorted(range(len(self.names)), key=self.names.__getitem__), np.int64)
        order = by_name[np.argsort(np.asarray(self.begins)[by_name], kind="stable")]
        return (self.entry(row) for (row,) in rows(order))


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
        entries, metadata = _parse(_read_header(stream, watch), watch)
        self.pieces = _pieces(entries, metadata.pop(PIECES_KEY, None))
        catalog = _catalog(entries, metadata)
        del entries
        super().__init__(
            stream,
            catalog,
            kind="safetensors",
            data_begin=stream.position,
            data_nbytes=catalog.storages_nbytes,
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


def _catalog(entries: _Entries, metadata: dict[str, str]) -> Catalog:
    data_nbytes = _check_offsets(entries)
    builder = CatalogBuilder()
    for entry in entries.in_order():
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
    return builder.build(storages_nbytes=data_nbytes, metadata=metadata)


def _read_header(stream: ByteStream, watch: MemoryWatch) -> str:
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
    watch.allow(2 * nbytes)
    # In chunks: what a length claims is not allocated before it has come.
    header = b"".join(stream.chunks(nbytes, chunk_nbytes=1 << 20, what="the header"))
    text_nbytes = nbytes if header.isascii() else 4 * nbytes
    watch.allow(text_nbytes + NAME_COPIES * nbytes + MEMBER_NBYTES * header.count(b"{"))
    try:
        return header.decode()
    except UnicodeDecodeError as error:
        raise _not_json(error) from None


def _parse(header: str, watch: MemoryWatch) -> tuple[_Entries, dict[str, str]]:
    """The tensors, and the metadata; no relation between tensors is checked."""
    entries = _Entries()
    metadata: object = None
    try:
        for name, value in _members(header, watch):
            if name == METADATA_KEY:
                metadata = value
            else:
                entries.add(_entry(name, value))
    except StreamPackError:
        raise
    except (ValueError, RecursionError) as error:
        # ValueError: JSON errors, and integers of more digits than Python converts.
        raise _not_json(error) from None
    return entries, _check_metadata({} if metadata is None else metadata)


def _members(text: str, watch: MemoryWatch) -> Iterator[tuple[str, object]]:
    """The members of the JSON object ``text``, one after the other: dicts of a million tensors take 500 MB.

    Raises: UnsupportedCheckpointError, LimitError, and what the JSON decoder raises.
    """
    seen: set[str] = set()
    at = _after_space(text, 1)
    more = not text.startswith("}", at)
    while more:
        if not text.startswith('"', at):
            raise json.JSONDecodeError("expected a name in double quotes", text, at)
        name, at = _JSON.raw_decode(text, at)
        if name in seen:
            raise _twice(name)
        seen.add(name)
        at = _after_space(text, at)
        if not text.startswith(":", at):
            raise json.JSONDecodeError("expected a colon", text, at)
        at = _after_space(text, at + 1)
        short = _short_value(text, at)
        if short is None and len(text) > MAX_VALUE_NCHARS:
            watch.allow(COLON_NBYTES * text.count(":", at) + COMMA_NBYTES * text.count(",", at))
        value, at = short or _JSON.raw_decode(text, at)
        yield name, value
        at = _after_space(text, at)
        more = text.startswith(",", at)
        if more:
            at = _after_space(text, at + 1)
    if not text.startswith("}", at) or _after_space(text, at + 1) < len(text):
        raise json.JSONDecodeError("expected a comma, or the end of the object and of the header", text, at)


def _short_value(text: str, at: int) -> tuple[object, int] | None:
    """The JSON value at ``at``, if it is as short as a tensor's, and where it ends; None if it is not, or no JSON."""
    end = text.find("}", at, at + MAX_VALUE_NCHARS) + 1
    try:
        value, nchars = _JSON.raw_decode(text[at:end])
    except (ValueError, RecursionError):
        return None
    return value, at + nchars


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # of any length
    return found.end()


def _not_json(error: Exception) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(f"the safetensors header is not JSON as the format wants it: {error}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _twice(counts.most_common(1)[0][0])
    return unique


def _twice(key: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"the safetensors header has the key {quoted(key)} twice: readers disagree on which one counts"
    )


def _refuse_constant(text: str) -> object:
    raise UnsupportedCheckpointError(f"the safetensors header holds {quoted(text)}, which is not JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\n\r]*")


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


def _pieces(entries: _Entries, text: str | None) -> bool | None:
    """``pieces`` of the source, from the text under :data:`PIECES_KEY`.  What cannot be read is no proof."""
    if text is None:
        return None
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(told, dict):
        return False
    for entry in entries.in_order():
        place = told.get(entry.name)
        begin = place.get("saved_offsets") if isinstance(place, dict) else None
        if not isinstance(begin, list) or len(begin) != len(entry.shape) or any(begin):
            return False
    return True


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
    return _Entry(name, dtype, shape, *offsets)


def _unknown_dtype(entry: _Entry) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"tensor {quoted(entry.name)} has the safetensors dtype {quoted(entry.dtype_name)}, which a pack cannot hold",
        tensor=entry.name,
    )


def _are_lengths(values: object) -> TypeGuard[list[int]]:
    # type() is int: True is an int to isinstance.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_NBYTES for value in values)


def _check_offsets(entries: _Entries) -> int:
    """Prove that the tensors tile the data, without hole or overlap; returns its length in bytes."""
    begins, ends = np.asarray(entries.begins), np.asarray(entries.ends)
    order = np.lexsort((ends, begins))
    positions = np.concatenate((np.zeros(1, np.int64), ends[order]))
    wrong = np.flatnonzero(begins[order] != positions[:-1])
    if len(wrong):
        entry, expected = entries.entry(order.item(wrong[0])), int(positions[wrong[0]])
        raise UnsupportedCheckpointError(
            f"tensor {quoted(entry.name)} has the data_offsets [{entry.begin}, {entry.end}], expected it to begin "
            f"at {expected}, where the one before ends: the safetensors header has a hole, an overlap or "
            "damage"
        )
    return int(positions[-1])
