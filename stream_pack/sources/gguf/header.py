"""What a GGUF file says before its data: key-values, and which tensors there are.

Nothing is allocated because a length says so, and nothing is believed: lengths, counts and the nesting of arrays are
bounded by the constants below, and the tensors are proved to tile the data.

Source: ggml, docs/gguf.md, versions 2 and 3; ggml.c for the types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np

from stream_pack.errors import UnsupportedCheckpointError, UnsupportedTensorError
from stream_pack.format.dtypes import BITS, BY_NAME, GGUF_TYPE_NOTE
from stream_pack.format.limits import MAX_NBYTES
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.text import quoted, shown

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MAX_HEADER_NBYTES = 64 << 20
"""Everything before the data: a vocabulary of 262,144 tokens with its merges takes about 16 MiB."""
MAX_STRING_NBYTES = 1 << 20
"""Chat templates, the longest texts, have about 10 KiB."""
MAX_KEY_NBYTES = 65535
"""The format's own limit for keys; names of tensors are shorter still."""
MAX_ELEMENTS = 4_000_000
"""Of all arrays together: they become JSON text, several times as long as they are here."""
SLICE = 4096
"""Elements of an array that are objects at the same time."""
MAX_DEPTH = 4
"""Arrays inside arrays; files of models have none."""
MAX_DIMS = 8
"""ggml has 4."""
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
MIN_PAIR_NBYTES = 8 + 4 + 1
MIN_INFO_NBYTES = 8 + 4 + 4 + 8

ALIGNMENT_KEY = "general.alignment"
SPLIT_KEY = "split.count"

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, str] = MappingProxyType({
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
})  # fmt: skip

_PLAIN: Mapping[int, int] = MappingProxyType({
    number: BY_NAME[name]
    for number, name in (
        (0, "float32"), (1, "float16"), (24, "int8"), (25, "int16"), (26, "int32"), (27, "int64"),
        (28, "float64"), (30, "bfloat16"),
    )
})  # fmt: skip

# Name, elements of a block, its bytes, as gguf's Python package has them.  Q8_1 (9) is a form of activations, which no
# tool is known to write; in ggml's C code its blocks have 36 bytes, and such a file does not pass the check of offsets.
_QUANTISED: Mapping[int, tuple[str, int, int]] = MappingProxyType({
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the header.  ``shape`` counts elements of ``dtype``, outermost first; ``begin`` counts bytes from
    the data's first.  ``unknown``: why it cannot be packed; its ``nbytes`` are then known only by what follows it."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    nbytes: int
    begin: int
    notes: dict[str, str]
    unknown: UnsupportedTensorError | None = None


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The tensors by offset, and the key-values as text.

    Units: bytes from the file's start.  ``end`` is the header's end; the data begins at ``data_begin``, has
    ``data_nbytes`` bytes, and may be padded up to ``padded_end``; None if a tensor of unknown length ends it.
    """

    tensors: list[GgufTensor]
    metadata: dict[str, str]
    end: int
    data_begin: int
    data_nbytes: int
    padded_end: int | None


def read_gguf_header(stream: ByteStream, watch: MemoryWatch) -> GgufHeader:
    """Read everything before the data's padding; ``stream`` is at the file's first byte.

    Raises: UnsupportedCheckpointError for another version, a big-endian file, one file of a split model, and a header
    that breaks a rule or a limit above; TruncatedSourceError.
    """
    reader = _Reader(stream, watch)
    count, pairs = reader.counts()
    metadata, alignment = reader.metadata(pairs)
    tensors = reader.tensors(count)
    end = stream.position
    data_begin = _aligned(end, alignment)
    data_nbytes = _check_offsets(tensors, alignment)
    ends = not tensors or tensors[-1].unknown is None
    padded_end = data_begin + _aligned(data_nbytes, alignment) if ends else None
    return GgufHeader(tensors, metadata, end, data_begin, data_nbytes, padded_end)


class _Reader:
    """Reads what precedes the data, piece by piece, and never more than the limits allow."""

    def __init__(self, stream: ByteStream, watch: MemoryWatch) -> None:
        self._stream = stream
        self._watch = watch
        self._elements = 0
        magic, version = bytes(self._take(4)), self._u32()
        if magic != MAGIC:
            raise UnsupportedCheckpointError(f"not GGUF: it begins with {quoted(magic)}")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                raise UnsupportedCheckpointError(
                    f"a big-endian GGUF file (version {swapped}): convert it with gguf_convert_endian.py of llama.cpp"
                )
            raise UnsupportedCheckpointError(
                f"a GGUF file of version {version}; this version reads {VERSIONS[0]} and {VERSIONS[1]}"
            )

    def counts(self) -> tuple[int, int]:
        """How many tensors and key-values follow; so many fit into the header that may be."""
        tensors, pairs = self._u64(), self._u64()
        if tensors * MIN_INFO_NBYTES + pairs * MIN_PAIR_NBYTES > MAX_HEADER_NBYTES:
            raise _damaged(
                f"it announces {tensors} tensors and {pairs} key-values, more than a header of "
                f"{MAX_HEADER_NBYTES} bytes can hold"
            )
        return tensors, pairs

    def metadata(self, pairs: int) -> tuple[dict[str, str], int]:
        """The key-values as text, and the alignment of the data."""
        metadata: dict[str, str] = {}
        alignment = DEFAULT_ALIGNMENT
        for _ in range(pairs):
            key = self._text(MAX_KEY_NBYTES, "a key")
            if key in metadata:
                raise _damaged(f"duplicate key {quoted(key)}")
            kind = self._u32()
            value = self._value(kind, MAX_DEPTH)
            if key == ALIGNMENT_KEY:
                alignment = _alignment(value)
            if key == SPLIT_KEY and type(value) is int and value > 1:
                raise UnsupportedCheckpointError(
                    f"one of the {value} files of a split GGUF model: merge them with llama-gguf-split --merge"
                )
            metadata[key] = value if isinstance(value, str) else json.dumps(value)
        return metadata, alignment

    def tensors(self, count: int) -> list[GgufTensor]:
        """What is said of every tensor, in the order of the data."""
        tensors = [self._tensor() for _ in range(count)]
        # By length too: one of no bytes may share its offset.
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.unknown is not None, tensor.nbytes))
        return tensors

    def _tensor(self) -> GgufTensor:
        name = self._text(MAX_KEY_NBYTES, "the name of a tensor")
        rank = self._u32()
        if rank > MAX_DIMS:
            raise _damaged(f"tensor {quoted(name)} has {rank} dims; the limit is {MAX_DIMS}")
        dims = [self._u64() for _ in range(rank)]
        if prod(dim or 1 for dim in dims) > MAX_NBYTES // 16:
            raise _damaged(f"tensor {quoted(name)} has the dims {dims}, too many elements")
        kind, begin = self._u32(), self._u64()
        shape = tuple(reversed(dims))  # the innermost dim comes first in the file
        plain = _PLAIN.get(kind)
        if plain is not None:
            return GgufTensor(name, plain, shape, BITS[plain] // 8 * prod(shape), begin, {})
        if kind not in _QUANTISED:
            error = UnsupportedTensorError(
                f"tensor {quoted(name)} has the GGUF type {kind}, which this version does not know", tensor=name
            )
            return GgufTensor(name, BY_NAME["uint8"], (0,), 0, begin, {}, error)
        label, block, block_nbytes = _QUANTISED[kind]
        if not shape or shape[-1] % block:
            raise _damaged(f"tensor {quoted(name)} of shape {list(shape)} has no whole blocks of {label}")
        rows = (*shape[:-1], shape[-1] // block * block_nbytes)
        notes = {GGUF_TYPE_NOTE: label, "gguf.shape": json.dumps(shape)}
        return GgufTensor(name, BY_NAME["uint8"], rows, prod(rows), begin, notes)

    def _value(self, kind: int, depth: int) -> object:
        if kind == _STRING:
            return self._text(MAX_STRING_NBYTES, "a string")
        if kind == _ARRAY:
            return self._array(depth)
        if kind == _BOOL:
            return bool(self._flags(1)[0])
        if kind not in _NUMBERS:
            raise _damaged(f"a value of type {kind}, which GGUF does not have")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _array(self, depth: int) -> str:
        """An array as JSON.  Its elements may be millions, which as objects take several times what the text does."""
        kind, count = self._u32(), self._u64()
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise _damaged(f"its arrays have more than {MAX_ELEMENTS} elements")
        if kind == _ARRAY and depth == 0:
            raise _damaged(f"arrays nested more than {MAX_DEPTH} deep")
        if kind not in (_STRING, _ARRAY, _BOOL) and kind not in _NUMBERS:
            raise _damaged(f"an array of type {kind}, which GGUF does not have")
        slices = (min(SLICE, count - begin) for begin in range(0, count, SLICE))
        pieces = [self._elements_as_json(kind, length, depth) for length in slices]
        if len(pieces) > 1:
            self._watch.allow(sum(map(len, pieces)))
        if pieces:  # brackets now: around the whole, they would make another copy of it
            pieces[0] = "[" + pieces[0]
            pieces[-1] += "]"
        return ", ".join(pieces) or "[]"

    def _elements_as_json(self, kind: int, count: int, depth: int) -> str:
        """The next elements of an array, with commas between them."""
        if kind == _ARRAY:
            return ", ".join(self._array(depth - 1) for _ in range(count))
        elements: list[object]
        if kind == _STRING:
            # Tokens may be any bytes; JSON can say so.
            elements = [self._token() for _ in range(count)]
        elif kind == _BOOL:
            elements = [bool(flag) for flag in self._flags(count)]
        else:
            dtype = np.dtype(_NUMBERS[kind])
            elements = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return json.dumps(elements)[1:-1]

    def _flags(self, count: int) -> bytes:
        flags = bytes(self._take(count))
        if flags.strip(b"\0\1"):
            raise _damaged("a boolean other than 0 and 1")
        return flags

    def _token(self) -> str:
        nbytes = self._u64()
        return bytes(self._string(nbytes, MAX_STRING_NBYTES, "a string")).decode("utf-8", "surrogateescape")

    def _text(self, limit: int, what: str) -> str:
        nbytes = self._u64()
        try:
            return bytes(self._string(nbytes, limit, what)).decode()
        except UnicodeDecodeError:
            raise _damaged(f"{what} is not UTF-8") from None

    def _string(self, nbytes: int, limit: int, what: str) -> memoryview:
        if nbytes > limit:
            raise _damaged(f"{what} of {nbytes} bytes; the limit is {limit}")
        return self._take(nbytes)

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, nbytes: int) -> memoryview:
        if self._stream.position + nbytes > MAX_HEADER_NBYTES:
            raise _damaged(f"it is longer than {MAX_HEADER_NBYTES} bytes")
        return self._stream.read_exactly(nbytes, what="the GGUF header")


def _alignment(value: object) -> int:
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise _damaged(f"its {ALIGNMENT_KEY} is {shown(value)}, expected a power of two up to {MAX_ALIGNMENT}")
    return value


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _check_offsets(tensors: list[GgufTensor], alignment: int) -> int:
    """Prove that the tensors tile the data, each after the padding of the one before; returns its length in bytes.

    A tensor of unknown length reaches up to the next one.
    """
    position, exact = 0, True
    for tensor in tensors:
        expected = _aligned(position, alignment)
        if tensor.begin != expected and (exact or tensor.begin != _aligned(tensor.begin, alignment)):
            raise _damaged(
                f"tensor {quoted(tensor.name)} has the offset {tensor.begin}, expected {expected}, where the "
                "one before it and its padding end: a hole, an overlap or damage"
            )
        position, exact = tensor.begin + tensor.nbytes, tensor.unknown is None
        if position > MAX_NBYTES:
            raise _damaged(f"its tensors span more than {MAX_NBYTES} bytes")
    return position


def _damaged(why: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(f"the GGUF header is damaged, hostile, or beyond what is read here: {why}")
