"""The index: what tensors a pack holds and where their bytes are, as columns.

One value, :class:`Index`, with :func:`encode_index` and :func:`decode_index`.  Decoding validates every bound
before a single view can exist, in vectorised steps (about 0.1 microseconds a tensor).  What only
``verify`` proves (names sorted and unique, blocks intact) is not checked here.
Source: docs/FORMAT.md, "Index".
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, LimitError
from stream_pack.format.align import Alignment
from stream_pack.format.checksum import block_counts, check_block_nbytes
from stream_pack.format.dtypes import BITS, BY_NAME
from stream_pack.format.flatbuf import Table, root_table
from stream_pack.format.flatbuf_write import check_flatbuffer_nbytes
from stream_pack.format.limits import MAX_DTYPES, MAX_NBYTES, MAX_RANK
from stream_pack.format.names import Names
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = [
    "NO_BUFFER",
    "PACK_NOTE",
    "BlockRange",
    "Index",
    "decode_index",
    "encode_index",
    "name_columns",
    "note_columns",
]

IDENTIFIER = b"SPI1"
NO_BUFFER = 0xFFFFFFFF
"""The buffer number of a tensor of 0 bytes."""
PACK_NOTE = 0xFFFFFFFF
"""The tensor number of a note about the pack itself."""


class BlockRange(NamedTuple):
    """Bytes ``[begin, end)`` of a buffer: its block ``number``, counted within the buffer."""

    buffer: int
    number: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Index:
    """The columns of docs/FORMAT.md, "Index"; entry ``k`` of every ``tensor_*`` column belongs to tensor ``k``.

    ``dims_ends``, ``name_ends`` and ``note_ends`` are prefix sums without the leading 0.  ``tensor_nbytes`` is derived
    from dtype and dims.

    Units: bytes; ``buffer_offsets`` count from the region's first byte, ``tensor_starts`` from the buffer's.
    Lifetime: after :func:`decode_index` most columns are views of the data it was given.
    """

    block_nbytes: int
    alignment: Alignment
    dtype_names: tuple[str, ...]
    dtype_bits: NDArray[np.uint16]
    buffer_offsets: NDArray[np.int64]
    buffer_nbytes: NDArray[np.int64]
    tensor_buffers: NDArray[np.uint32]
    tensor_starts: NDArray[np.int64]
    tensor_dtypes: NDArray[np.uint8]
    tensor_nbytes: NDArray[np.int64]
    dims_ends: NDArray[np.int64]
    dims: NDArray[np.int64]
    name_ends: NDArray[np.int64]
    names: NDArray[np.uint8]
    name_order: NDArray[np.uint32]
    note_tensors: NDArray[np.uint32]
    note_ends: NDArray[np.int64]
    note_text: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tensor_buffers)

    @cached_property
    def block_counts(self) -> NDArray[np.int64]:
        """How many blocks each buffer has."""
        return block_counts(self.buffer_nbytes, self.block_nbytes)

    @cached_property
    def block_ends(self) -> NDArray[np.int64]:
        """Prefix sums of :attr:`block_counts`: buffer ``b`` has the blocks ``[block_ends[b-1], block_ends[b])``."""
        return np.cumsum(self.block_counts)

    @cached_property
    def first_blocks(self) -> NDArray[np.int64]:
        """The number of each buffer's first block; blocks are numbered through all buffers."""
        return self.block_ends - self.block_counts

    def first_block(self, buffer: int) -> int:
        """The number of a buffer's first block."""
        return int(self.first_blocks[buffer])

    def block_range(self, block: int) -> BlockRange:
        """Where a block is."""
        buffer = int(np.searchsorted(self.block_ends, block, side="right"))
        number = block - self.first_block(buffer)
        begin = number * self.block_nbytes
        end = min(begin + self.block_nbytes, int(self.buffer_nbytes[buffer]))
        return BlockRange(buffer, number, begin, end)

    def first_tensor(self, buffer: int) -> int:
        """The lowest number of the tensors in a buffer."""
        return int(np.flatnonzero(self.tensor_buffers == buffer)[0])

    @property
    def checksums_nbytes(self) -> int:
        """Length of the checksums section."""
        return 8 * int(self.block_ends[-1]) if len(self.block_ends) else 0

    @cached_property
    def ragged_dims(self) -> Ragged[np.int64]:
        """A row for each tensor."""
        return Ragged(self.dims, self.dims_ends)

    @cached_property
    def ragged_names(self) -> Ragged[np.uint8]:
        """A row for each tensor."""
        return Ragged(self.names, self.name_ends)

    @cached_property
    def ragged_notes(self) -> Ragged[np.uint8]:
        """Two rows for each note: its key, its value."""
        return Ragged(self.note_text, self.note_ends)

    def name_bytes(self, tensor: int) -> bytes:
        """The UTF-8 name of a tensor."""
        return self.ragged_names.row(tensor).tobytes()

    def name(self, tensor: int) -> str:
        """The name of a tensor."""
        return self.name_bytes(tensor).decode()

    def ordered_names(self) -> list[bytes]:
        """All names, in the order that ``name_order`` says."""
        text, ends = self.names.tobytes(), self.name_ends.tolist()
        names = [text[begin:end] for begin, end in zip([0, *ends], ends)]
        return [names[tensor] for tensor in self.name_order.tolist()]

    @cached_property
    def _is_ordered(self) -> bool:
        names = self.ordered_names()
        return all(map(operator.lt, names, names[1:]))

    def find(self, name: str) -> int | None:
        """The number of the tensor of this name; a binary search, no table is built.

        Opening does not prove the order of the names.  A name that is found is the right one in any order; before one
        is said not to be there, the order is proved, once.

        Raises: FormatError when it is wrong.
        """
        try:
            wanted = name.encode()
        except UnicodeEncodeError:
            return None
        order = self.name_order
        place = bisect_left(order, wanted, key=self.name_bytes)
        found = place < len(order) and self.name_bytes(order.item(place)) == wanted
        if not found and not self._is_ordered:
            raise FormatError("the index is broken: expected names sorted as name_order says; the file is damaged")
        return order.item(place) if found else None

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The dims of a tensor, outermost first, in elements."""
        return tuple(self.ragged_dims.row(tensor).tolist())

    def dtype_name(self, tensor: int) -> str:
        """The dtype of a tensor, as the pack names it."""
        return self.dtype_names[int(self.tensor_dtypes[tensor])]

    def offset(self, tensor: int) -> int:
        """Where a tensor starts, from the region's first byte; 0 for a tensor of 0 bytes."""
        buffer = int(self.tensor_buffers[tensor])
        if buffer == NO_BUFFER:
            return 0
        return int(self.buffer_offsets[buffer]) + int(self.tensor_starts[tensor])

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """:meth:`offset` of every tensor."""
        held = self.tensor_buffers != NO_BUFFER
        offsets = np.zeros(len(self), np.int64)
        offsets[held] = self.buffer_offsets[self.tensor_buffers[held]] + self.tensor_starts[held]
        return offsets

    def notes(self, tensor: int = PACK_NOTE) -> dict[str, str]:
        """The notes about a tensor, or about the pack itself (its metadata)."""
        first, last = np.searchsorted(self.note_tensors, [tensor, tensor + 1])

        def text(row: int) -> str:
            return self.ragged_notes.row(row).tobytes().decode()

        return {text(2 * n): text(2 * n + 1) for n in range(int(first), int(last))}


class NameColumns(TypedDict):
    """The columns about names."""

    name_ends: NDArray[np.int64]
    names: NDArray[np.uint8]
    name_order: NDArray[np.uint32]


class NoteColumns(TypedDict):
    """The columns about notes."""

    note_tensors: NDArray[np.uint32]
    note_ends: NDArray[np.int64]
    note_text: NDArray[np.uint8]


def name_columns(names: Sequence[str]) -> NameColumns:
    """The columns for names in tensor order.  Copies: none of :class:`stream_pack.format.names.Names`."""
    names = Names.of(names)
    return {"name_ends": names.column.ends, "names": names.column.values, "name_order": names.order()}


def note_columns(metadata: Mapping[str, str], notes: Sequence[tuple[int, str, str]]) -> NoteColumns:
    """The columns for the pack's metadata and the tensors' notes.

    Raises: LimitError for text that UTF-8 cannot hold.
    """
    triplets = [*notes, *((PACK_NOTE, key, value) for key, value in metadata.items())]
    try:
        encoded = sorted((tensor, key.encode(), value.encode()) for tensor, key, value in triplets)
    except UnicodeEncodeError as error:
        raise LimitError(f"metadata has a lone surrogate: {quoted(error.object)}") from None
    texts = [text for _, key, value in encoded for text in (key, value)]
    return {
        "note_tensors": np.fromiter((row[0] for row in encoded), np.uint32, len(encoded)),
        "note_ends": np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))),
        "note_text": np.frombuffer(b"".join(texts), np.uint8),
    }


# Slots of schema/index.fbs: four scalars, the names of the dtypes, then the columns.
_BLOCK_NBYTES, _ALIGNMENT_SMALL, _ALIGNMENT_LARGE, _LARGE_NBYTES, _DTYPE_NAMES = range(5)
_TYPES: tuple[tuple[str, type[np.unsignedinteger[Any]]], ...] = (
    ("dtype_bits", np.uint16),
    ("buffer_offsets", np.uint64),
    ("buffer_nbytes", np.uint64),
    ("tensor_buffers", np.uint32),
    ("tensor_starts", np.uint64),
    ("tensor_dtypes", np.uint8),
    ("dims_ends", np.uint64),
    ("dims", np.uint64),
    ("name_ends", np.uint64),
    ("names", np.uint8),
    ("name_order", np.uint32),
    ("note_tensors", np.uint32),
    ("note_ends", np.uint64),
    ("note_text", np.uint8),
)
"""The columns of the file in order of their slots: those of :class:`Index` of the same name; a u64 is int64 there."""
_COLUMNS = {name: (slot, dtype) for slot, (name, dtype) in enumerate(_TYPES, _DTYPE_NAMES + 1)}


def encode_index(index: Index) -> memoryview:
    """The flatbuffer ``SPI1``.

    Raises: LimitError when it would reach 2 GiB.
    """
    total = 1 << 12  # for all but the columns
    total += sum(getattr(index, name).size * np.dtype(dtype).itemsize for name, (_, dtype) in _COLUMNS.items())
    check_flatbuffer_nbytes(total, f"an index for {len(index)} tensors")
    builder = flatbuffers.Builder(total)
    names = [builder.CreateString(name) for name in index.dtype_names]
    builder.StartVector(4, len(names), 4)
    for offset in reversed(names):
        builder.PrependUOffsetTRelative(offset)
    offsets = {_DTYPE_NAMES: builder.EndVector()}
    for name, (slot, dtype) in _COLUMNS.items():
        column = np.ascontiguousarray(getattr(index, name), np.dtype(dtype).newbyteorder("<"))
        offsets[slot] = builder.CreateNumpyVector(column)
    builder.StartObject(_DTYPE_NAMES + 1 + len(_COLUMNS))
    alignment = index.alignment
    scalars = (index.block_nbytes, alignment.small, alignment.large, alignment.large_nbytes)
    for slot, value in enumerate(scalars):
        builder.PrependUint64Slot(slot, value, 0)
    for slot, offset in offsets.items():
        builder.PrependUOffsetTRelativeSlot(slot, offset, 0)
    builder.Finish(builder.EndObject(), IDENTIFIER)
    return memoryview(builder.Bytes)[builder.Head() :]  # Output() is a copy


def decode_index(data: memoryview, *, region_nbytes: int) -> Index:
    """Read and validate the index; ``data`` is exactly its flatbuffer.

    Copies: none of the columns that have 4- and 8-byte entries.
    Raises: FormatError, naming the first bound that does not hold.
    """
    table = root_table(data, IDENTIFIER, "the index")
    try:
        alignment = Alignment(
            small=table.scalar(_ALIGNMENT_SMALL, "<Q"),
            large=table.scalar(_ALIGNMENT_LARGE, "<Q"),
            large_nbytes=table.scalar(_LARGE_NBYTES, "<Q"),
        )
        block_nbytes = check_block_nbytes(table.scalar(_BLOCK_NBYTES, "<Q"))
    except LimitError as error:
        raise FormatError(f"the index is broken: {error}") from None
    columns = {name: _column(table, name) for name in _COLUMNS}
    index = Index(
        block_nbytes=block_nbytes,
        alignment=alignment,
        dtype_names=tuple(table.strings(_DTYPE_NAMES, limit=MAX_DTYPES)),
        tensor_nbytes=np.empty(0, np.int64),
        **columns,
    )
    _check_dtypes(index)
    _check_ends(index.ragged_dims, len(index), "dims")
    nbytes = _tensor_nbytes(index.dtype_bits[index.tensor_dtypes], index.ragged_dims)
    index = replace(index, tensor_nbytes=nbytes)
    _check_buffers(index, region_nbytes)
    _check_places(index)
    _check_names(index)
    _check_notes(index)
    return index


def _column(table: Table, name: str) -> Any:
    """A column, in place; one of u64 as int64."""
    slot, dtype = _COLUMNS[name]
    column = table.vector(slot, dtype)
    if dtype is not np.uint64:
        return column
    what = name.replace("_", " ")
    _require(len(column) == 0 or int(column.max()) <= MAX_NBYTES, f"{what} up to 2**62")
    return column.view(np.int64)


def _require(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise FormatError(f"the index is broken: expected {what}")


def _check_ends(rows: Ragged[Any], count: int, what: str) -> None:
    """There are ``count`` rows, and all values belong to them."""
    ends, total = rows.ends, len(rows.values)
    _require(len(ends) == count, f"{count} ends of {what}, found {len(ends)}")
    _require((ends[1:] >= ends[:-1]).all(), f"ascending ends of {what}")
    _require((int(ends[-1]) if count else 0) == total, f"ends of {what} that end at {total}")


def _check_dtypes(index: Index) -> None:
    names = index.dtype_names
    _require(len(index.dtype_bits) == len(names), "one number of bits per dtype")
    for name, bits in zip(names, index.dtype_bits.tolist()):
        known = BITS[BY_NAME[name]] if name in BY_NAME else max(1, bits)
        _require(bits == known, f"{known} bits for the dtype {quoted(name)}, found {bits}")
    _require(len(index.tensor_dtypes) == len(index), "one dtype per tensor")
    _require((index.tensor_dtypes < len(names)).all(), "dtype numbers within the table")


def _check_buffers(index: Index, region_nbytes: int) -> None:
    offsets, nbytes = index.buffer_offsets, index.buffer_nbytes
    _require(len(offsets) == len(nbytes), "one offset and one length per buffer")
    _require((nbytes > 0).all(), "buffers of at least one byte")
    # Never offset + nbytes: that sum may wrap.
    _require(
        (offsets <= region_nbytes).all() and (nbytes <= region_nbytes - offsets).all(), "buffers inside the region"
    )
    _require((offsets[1:] >= offsets[:-1] + nbytes[:-1]).all(), "buffers in ascending order that do not overlap")


def _check_places(index: Index) -> None:
    _require(len(index.tensor_starts) == len(index), "one start per tensor")
    held = index.tensor_buffers != NO_BUFFER
    _require((held == (index.tensor_nbytes > 0)).all(), "a buffer for exactly the tensors that have bytes")
    _require(not index.tensor_starts[~held].any(), "start 0 for tensors of 0 bytes")
    buffers, starts = index.tensor_buffers[held], index.tensor_starts[held]
    nbytes = index.tensor_nbytes[held]
    _require((buffers < len(index.buffer_offsets)).all(), "existing buffers")
    room = index.buffer_nbytes[buffers]
    _require((starts <= room).all() and (nbytes <= room - starts).all(), "tensors inside their buffers")
    wanted = index.alignment.of(nbytes)
    _require(
        not ((index.buffer_offsets[buffers] | starts) & (wanted - 1)).any(), "tensors at multiples of their alignment"
    )


def _check_names(index: Index) -> None:
    _check_ends(index.ragged_names, len(index), "names")
    _check_text(index.ragged_names, "names")
    order = index.name_order
    _require(len(order) == len(index), "one entry of the name order per tensor")
    # Numbers first: counting takes memory for the largest.
    in_range = (order < len(order)).all()
    once = in_range and (np.bincount(order, minlength=len(order)) == 1).all()
    _require(once, "a name order that is a permutation")


def _check_notes(index: Index) -> None:
    tensors = index.note_tensors
    _check_ends(index.ragged_notes, 2 * len(tensors), "notes")
    _check_text(index.ragged_notes, "notes")
    _require(
        ((tensors < len(index)) | (tensors == PACK_NOTE)).all() and (tensors[1:] >= tensors[:-1]).all(),
        "notes sorted by tensor, of existing tensors",
    )


def _tensor_nbytes(bits: NDArray[np.uint16], dims: Ragged[np.int64]) -> NDArray[np.int64]:
    """Lengths from dtypes and dims, after proving that no product leaves 63 bits."""
    begins, ranks = dims.begins, dims.lengths
    _require(not len(ranks) or int(ranks.max()) <= MAX_RANK, f"at most {MAX_RANK} dims per tensor")
    nbits = bits.astype(np.int64)
    nbytes = np.zeros(len(bits), np.int64)
    # Rank by rank: np.multiply.reduceat is wrong for empty slices, which rank 0 has.
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        shapes = dims.values[begins[rows, None] + np.arange(rank)]
        # Zero dims out first, so that a zero cannot hide a product that overflows elsewhere.
        filled = np.where(shapes == 0, 1, shapes)
        # float64 proves that the exact products fit: 64 factors round by less than one part in 2**46.
        rough = filled.astype(np.float64).prod(axis=1)
        fits = (rough < MAX_NBYTES * 1.001) & (rough * nbits[rows] < 8 * MAX_NBYTES * 1.001)
        _require(bool(fits.all()), "tensors of at most 2**62 bytes")
        elements = filled.prod(axis=1)
        # Not elements * bits // 8: that product may need 66 bits.
        length = elements // 8 * nbits[rows] + elements % 8 * nbits[rows] // 8
        _require((elements <= MAX_NBYTES).all() and (length <= MAX_NBYTES).all(), "tensors of at most 2**62 bytes")
        last = shapes[:, -1] if rank else np.ones(len(rows), np.int64)
        _require(not (last % 8 * nbits[rows] % 8).any(), "last dims that fill whole bytes")
        nbytes[rows] = np.where((shapes == 0).any(axis=1), 0, length)
    return nbytes


def _check_text(rows: Ragged[np.uint8], what: str) -> None:
    """The values are UTF-8, and no end cuts a character in two."""
    text, ends = rows.values, rows.ends
    try:
        str(text.data, "utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"the index is broken: expected {what} in UTF-8") from None
    inner = ends[ends < len(text)]
    _require(not ((text[inner] & 0xC0) == 0x80).any(), f"{what} with no end inside a character")
