"""The index: what tensors a pack holds and where their bytes lie, as columns.

One value, :class:`Index`, with :func:`encode` and :func:`decode`.  Decoding validates every bound
before a single view can exist, in vectorised steps (about 0.1 microseconds a tensor).  What only
``verify`` proves - names sorted and unique, blocks as they were written - is not looked at here.
Source: docs/FORMAT.md, "Index".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import flatbuffers
import numpy as np
from numpy.typing import NDArray

import stream_pack.format.schema.generated.Index as fbs
from stream_pack.errors import FormatError, LimitError
from stream_pack.format.align import Alignment
from stream_pack.format.checksum import block_counts, check_block_nbytes
from stream_pack.format.dtypes import BITS, BY_NAME
from stream_pack.format.flatbuf import Table, root_table
from stream_pack.format.flatbuf_write import check_flatbuffer_nbytes
from stream_pack.format.limits import MAX_DTYPES, MAX_NBYTES, MAX_RANK
from stream_pack.format.ragged import Ragged

__all__ = [
    "NO_BUFFER",
    "PACK_NOTE",
    "BlockRange",
    "Index",
    "decode",
    "encode",
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
    """The columns of docs/FORMAT.md, "Index"; entry ``k`` of every ``tensor_*`` column belongs to
    tensor ``k``.

    ``dims_ends``, ``name_ends`` and ``note_ends`` are prefix sums without the leading 0.
    ``tensor_nbytes`` is derived from dtype and dims.

    Units: bytes; ``buffer_offsets`` count from the region's first byte, ``tensor_starts`` from the
    buffer's.
    Lifetime: after :func:`decode` most columns are views of the data it was given.
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
        """Prefix sums of :attr:`block_counts`: buffer ``b`` has the blocks ``[block_ends[b-1],
        block_ends[b])``."""
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

    def find(self, name: str) -> int | None:
        """The number of the tensor of this name; a binary search, no table is built."""
        try:
            wanted = name.encode()
        except UnicodeEncodeError:
            return None
        low, high = 0, len(self.name_order)
        while low < high:
            middle = (low + high) // 2
            if self.name_bytes(int(self.name_order[middle])) < wanted:
                low = middle + 1
            else:
                high = middle
        if low < len(self.name_order):
            tensor = int(self.name_order[low])
            if self.name_bytes(tensor) == wanted:
                return tensor
        return None

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


def name_columns(
    names: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint32]]:
    """``name_ends``, ``names`` and ``name_order`` for names in tensor order."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    blob = np.frombuffer(b"".join(encoded), np.uint8)
    order = np.array(sorted(range(len(encoded)), key=encoded.__getitem__), np.uint32)
    return ends, blob, order


def note_columns(
    metadata: Mapping[str, str], notes: Sequence[tuple[int, str, str]]
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint8]]:
    """``note_tensors``, ``note_ends`` and ``note_text`` for the pack's metadata and the tensors'
    notes.

    Raises: LimitError for text that UTF-8 cannot hold.
    """
    triplets = [*notes, *((PACK_NOTE, key, value) for key, value in metadata.items())]
    try:
        encoded = sorted((tensor, key.encode(), value.encode()) for tensor, key, value in triplets)
    except UnicodeEncodeError as error:
        raise LimitError(f"metadata holds a lone surrogate: {error.object!r}") from None
    texts = [text for _, key, value in encoded for text in (key, value)]
    return (
        np.fromiter((tensor for tensor, _, _ in encoded), np.uint32, len(encoded)),
        np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))),
        np.frombuffer(b"".join(texts), np.uint8),
    )


def encode(index: Index) -> bytes:
    """The flatbuffer ``SPI1``.

    Raises: LimitError when it would reach 2 GiB.
    """
    total = 1 << 12
    for array in (index.names, index.note_text, index.dims, index.name_ends):
        total += array.nbytes
    total += 64 * len(index) + 16 * len(index.buffer_offsets) + 20 * len(index.note_tensors)
    check_flatbuffer_nbytes(total, f"an index for {len(index)} tensors")
    builder = flatbuffers.Builder(total)

    def vector(array: NDArray[np.generic], dtype: str) -> int:
        offset: int = builder.CreateNumpyVector(np.ascontiguousarray(array, dtype))
        return offset

    names = [builder.CreateString(name) for name in index.dtype_names]
    fbs.IndexStartDtypeNamesVector(builder, len(names))
    for offset in reversed(names):
        builder.PrependUOffsetTRelative(offset)
    fields = [
        (fbs.IndexAddDtypeNames, builder.EndVector()),
        (fbs.IndexAddDtypeBits, vector(index.dtype_bits, "<u2")),
        (fbs.IndexAddBufferOffsets, vector(index.buffer_offsets, "<u8")),
        (fbs.IndexAddBufferNbytes, vector(index.buffer_nbytes, "<u8")),
        (fbs.IndexAddTensorBuffers, vector(index.tensor_buffers, "<u4")),
        (fbs.IndexAddTensorStarts, vector(index.tensor_starts, "<u8")),
        (fbs.IndexAddTensorDtypes, vector(index.tensor_dtypes, "u1")),
        (fbs.IndexAddDimsEnds, vector(index.dims_ends, "<u8")),
        (fbs.IndexAddDims, vector(index.dims, "<u8")),
        (fbs.IndexAddNameEnds, vector(index.name_ends, "<u8")),
        (fbs.IndexAddNames, vector(index.names, "u1")),
        (fbs.IndexAddNameOrder, vector(index.name_order, "<u4")),
        (fbs.IndexAddNoteTensors, vector(index.note_tensors, "<u4")),
        (fbs.IndexAddNoteEnds, vector(index.note_ends, "<u8")),
        (fbs.IndexAddNoteText, vector(index.note_text, "u1")),
    ]
    fbs.IndexStart(builder)
    fbs.IndexAddBlockNbytes(builder, index.block_nbytes)
    fbs.IndexAddAlignmentSmall(builder, index.alignment.small)
    fbs.IndexAddAlignmentLarge(builder, index.alignment.large)
    fbs.IndexAddLargeNbytes(builder, index.alignment.large_nbytes)
    for add, offset in fields:
        add(builder, offset)
    builder.Finish(fbs.IndexEnd(builder), IDENTIFIER)
    return bytes(builder.Output())


# Slots in the order of schema/index.fbs.
(
    _BLOCK_NBYTES,
    _ALIGNMENT_SMALL,
    _ALIGNMENT_LARGE,
    _LARGE_NBYTES,
    _DTYPE_NAMES,
    _DTYPE_BITS,
    _BUFFER_OFFSETS,
    _BUFFER_NBYTES,
    _TENSOR_BUFFERS,
    _TENSOR_STARTS,
    _TENSOR_DTYPES,
    _DIMS_ENDS,
    _DIMS,
    _NAME_ENDS,
    _NAMES,
    _NAME_ORDER,
    _NOTE_TENSORS,
    _NOTE_ENDS,
    _NOTE_TEXT,
) = range(19)


def decode(data: memoryview, *, region_nbytes: int) -> Index:
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

    dtype_names = tuple(table.strings(_DTYPE_NAMES, limit=MAX_DTYPES))
    dtype_bits = table.vector(_DTYPE_BITS, np.uint16)
    tensor_buffers = table.vector(_TENSOR_BUFFERS, np.uint32)
    tensor_dtypes = table.vector(_TENSOR_DTYPES, np.uint8)
    tensors = len(tensor_buffers)
    _require(len(dtype_bits) == len(dtype_names), "one number of bits a dtype")
    for name, bits in zip(dtype_names, dtype_bits.tolist()):
        known = BITS[BY_NAME[name]] if name in BY_NAME else max(1, bits)
        _require(bits == known, f"{known} bits for the dtype {name!r}, found {bits}")
    _require(len(tensor_dtypes) == tensors, "one dtype a tensor")
    _require(bool((tensor_dtypes < len(dtype_names)).all()), "dtype numbers within the table")

    dims = _wide(table, _DIMS, "dims")
    dims_ends = _ends(table, _DIMS_ENDS, tensors, len(dims), "dims")
    tensor_nbytes = _tensor_nbytes(dtype_bits[tensor_dtypes], Ragged(dims, dims_ends))

    buffer_offsets, buffer_nbytes = _decode_buffers(table, region_nbytes)
    tensor_starts = _wide(table, _TENSOR_STARTS, "tensor starts")
    _require(len(tensor_starts) == tensors, "one start a tensor")
    _check_places(
        alignment, buffer_offsets, buffer_nbytes, tensor_buffers, tensor_starts, tensor_nbytes
    )

    names = table.vector(_NAMES, np.uint8)
    name_ends = _ends(table, _NAME_ENDS, tensors, len(names), "names")
    _check_text(names, name_ends, "names")
    name_order = table.vector(_NAME_ORDER, np.uint32)
    _require(len(name_order) == tensors, "one place in the name order a tensor")
    _require(
        tensors == 0
        or (
            int(name_order.max()) < tensors
            and bool((np.bincount(name_order, minlength=tensors) == 1).all())
        ),
        "a name order that is a permutation",
    )

    note_tensors = table.vector(_NOTE_TENSORS, np.uint32)
    note_text = table.vector(_NOTE_TEXT, np.uint8)
    note_ends = _ends(table, _NOTE_ENDS, 2 * len(note_tensors), len(note_text), "notes")
    _check_text(note_text, note_ends, "notes")
    _require(
        bool(((note_tensors < tensors) | (note_tensors == PACK_NOTE)).all())
        and bool((note_tensors[1:] >= note_tensors[:-1]).all()),
        "notes sorted by existing tensors",
    )
    return Index(
        block_nbytes=block_nbytes,
        alignment=alignment,
        dtype_names=dtype_names,
        dtype_bits=dtype_bits,
        buffer_offsets=buffer_offsets,
        buffer_nbytes=buffer_nbytes,
        tensor_buffers=tensor_buffers,
        tensor_starts=tensor_starts,
        tensor_dtypes=tensor_dtypes,
        tensor_nbytes=tensor_nbytes,
        dims_ends=dims_ends,
        dims=dims,
        name_ends=name_ends,
        names=names,
        name_order=name_order,
        note_tensors=note_tensors,
        note_ends=note_ends,
        note_text=note_text,
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise FormatError(f"the index is broken: expected {what}")


def _wide(table: Table, slot: int, what: str) -> NDArray[np.int64]:
    """A u64 column as int64, in place."""
    column = table.vector(slot, np.uint64)
    _require(len(column) == 0 or int(column.max()) <= MAX_NBYTES, f"{what} up to 2**62")
    return column.view(np.int64)


def _ends(table: Table, slot: int, count: int, total: int, what: str) -> NDArray[np.int64]:
    """A column of prefix sums: ``count`` of them, ascending, the last one ``total``."""
    ends = _wide(table, slot, f"ends of {what}")
    _require(len(ends) == count, f"{count} ends of {what}, found {len(ends)}")
    _require(bool((ends[1:] >= ends[:-1]).all()), f"ends of {what} that ascend")
    _require((int(ends[-1]) if count else 0) == total, f"ends of {what} that end at {total}")
    return ends


def _decode_buffers(
    table: Table, region_nbytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets = _wide(table, _BUFFER_OFFSETS, "buffer offsets")
    nbytes = _wide(table, _BUFFER_NBYTES, "buffer nbytes")
    _require(len(offsets) == len(nbytes), "an offset and a length a buffer")
    _require(bool((nbytes > 0).all()), "buffers of at least one byte")
    # Never offset + nbytes: that sum may wrap.
    _require(
        bool((offsets <= region_nbytes).all()) and bool((nbytes <= region_nbytes - offsets).all()),
        "buffers inside the region",
    )
    _require(
        bool((offsets[1:] >= offsets[:-1] + nbytes[:-1]).all()),
        "buffers in ascending order that do not overlap",
    )
    return offsets, nbytes


def _check_places(
    alignment: Alignment,
    buffer_offsets: NDArray[np.int64],
    buffer_nbytes: NDArray[np.int64],
    tensor_buffers: NDArray[np.uint32],
    tensor_starts: NDArray[np.int64],
    tensor_nbytes: NDArray[np.int64],
) -> None:
    held = tensor_buffers != NO_BUFFER
    _require(
        bool((held == (tensor_nbytes > 0)).all()),
        "a buffer for exactly the tensors that have bytes",
    )
    _require(not tensor_starts[~held].any(), "start 0 for tensors of 0 bytes")
    buffers, starts, nbytes = tensor_buffers[held], tensor_starts[held], tensor_nbytes[held]
    _require(bool((buffers < len(buffer_offsets)).all()), "existing buffers")
    room = buffer_nbytes[buffers]
    _require(
        bool((starts <= room).all()) and bool((nbytes <= room - starts).all()),
        "tensors inside their buffers",
    )
    wanted = alignment.of(nbytes)
    _require(
        not ((buffer_offsets[buffers] | starts) & (wanted - 1)).any(),
        "tensors at multiples of their alignment",
    )


def _tensor_nbytes(bits: NDArray[np.uint16], dims: Ragged[np.int64]) -> NDArray[np.int64]:
    """Lengths from dtypes and dims, after proving that no product leaves 63 bits."""
    begins, ranks = dims.begins, dims.lengths
    _require(not len(ranks) or int(ranks.max()) <= MAX_RANK, f"at most {MAX_RANK} dims a tensor")
    nbits = bits.astype(np.int64)
    nbytes = np.zeros(len(bits), np.int64)
    # Rank by rank: np.multiply.reduceat is wrong for empty slices, which rank 0 has.
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        shapes = dims.values[begins[rows, None] + np.arange(rank)]
        # Zero dims out first, so that a zero cannot hide a product that overflows elsewhere.
        filled = np.where(shapes == 0, 1, shapes)
        # float64 proves that the exact products fit: 64 factors round by less than one part in
        # 2**46.
        rough = filled.astype(np.float64).prod(axis=1)
        fits = (rough < MAX_NBYTES * 1.001) & (rough * nbits[rows] < 8 * MAX_NBYTES * 1.001)
        _require(bool(fits.all()), "tensors of at most 2**62 bytes")
        elements = filled.prod(axis=1)
        # Not elements * bits // 8: that product may need 66 bits.
        length = elements // 8 * nbits[rows] + elements % 8 * nbits[rows] // 8
        _require(
            bool((elements <= MAX_NBYTES).all() and (length <= MAX_NBYTES).all()),
            "tensors of at most 2**62 bytes",
        )
        last = shapes[:, -1] if rank else np.ones(len(rows), np.int64)
        _require(not (last % 8 * nbits[rows] % 8).any(), "last dims that fill whole bytes")
        nbytes[rows] = np.where((shapes == 0).any(axis=1), 0, length)
    return nbytes


def _check_text(text: NDArray[np.uint8], ends: NDArray[np.int64], what: str) -> None:
    """``text`` is UTF-8, and no end cuts a character in two."""
    try:
        str(text.data, "utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"the index is broken: expected {what} in UTF-8") from None
    inner = ends[ends < len(text)]
    _require(not ((text[inner] & 0xC0) == 0x80).any(), f"{what} that end between characters")
