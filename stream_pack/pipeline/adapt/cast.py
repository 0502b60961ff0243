"""Casting floats as torch casts them, chunk by chunk.

NumPy and ml_dtypes do the arithmetic.  As in torch, every cast goes through float32 (so float64 to float16 rounds
twice), to the nearest, ties to even; what is too large becomes infinity, denormals stay denormal.  Every float8 has an
exact float32.

A NaN stays a NaN.  Which one, torch answers differently by machine, and on one machine by how many elements there are;
a pack's bytes must not.  The rule here is that of its vector code on x86-64: sign and leading payload bits are kept,
and the NaN becomes a quiet one, but for bfloat16.  There a NaN from float32 and float64 is 0xFFFF, from any other float
0x7FC0; and bfloat16 to float32 changes no bit.  The NaNs of float8 become those of :data:`_FLOAT8_NANS` in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.checksum import zeros
from stream_pack.format.dtypes import BITS, BY_NAME, DTYPES
from stream_pack.pipeline.chunks import Chunk, Zeros

__all__ = ["CastStream", "cast_bytes", "load_casts"]

F16, BF16, F32, F64 = (BY_NAME[name] for name in ("float16", "bfloat16", "float32", "float64"))
F8_E5M2, F8_E8M0 = BY_NAME["float8_e5m2"], BY_NAME["float8_e8m0fnu"]

_FLOAT8_NANS = {
    BY_NAME["float8_e4m3fn"]: 0x7FF0_0000,
    BY_NAME["float8_e4m3fnuz"]: 0x7F80_0001,
    BY_NAME["float8_e5m2fnuz"]: 0x7F80_0001,
    BY_NAME["float8_e8m0fnu"]: 0x7F80_0001,
}
"""What torch makes of a positive NaN (torch/headeronly/util); float8_e5m2 is the upper half of a float16."""

_Float32: TypeAlias = "NDArray[np.float32]"


class CastStream:
    """The bytes of one buffer on their way from dtype ``source`` to dtype ``target``.

    ``skip``: bytes at the start of the result to be dropped; ``nbytes``: how many to keep after them.
    Memory: a result of at most ``chunk_nbytes`` at a time (one element at least).
    """

    def __init__(self, source: int, target: int, *, skip: int, nbytes: int, chunk_nbytes: int) -> None:
        self._source, self._target = source, target
        self._from, self._to = BITS[source] // 8, BITS[target] // 8
        self._skip = skip
        self._left = nbytes
        self._chunk_nbytes = chunk_nbytes
        self._torn = b""
        """The bytes of an element that the last chunk ended in."""

    def feed(self, chunk: Chunk) -> Iterator[Chunk]:
        """The next bytes of the source, cast.  Elements may be cut anywhere between chunks."""
        if self._torn:
            missing = self._from - len(self._torn)
            head = bytes(min(missing, len(chunk))) if isinstance(chunk, Zeros) else chunk[:missing]
            self._torn += head
            chunk = Zeros(len(chunk) - len(head)) if isinstance(chunk, Zeros) else chunk[missing:]
            if len(self._torn) < self._from:
                return
            element, self._torn = self._torn, b""
            yield from self._cast(memoryview(element))
        torn = len(chunk) % self._from
        whole = len(chunk) - torn
        if self._source == F8_E8M0 and isinstance(chunk, Zeros):  # zero bits are 2**-127
            for part in zeros(len(chunk)):
                yield from self._cast(part)
        elif isinstance(chunk, Zeros):
            self._torn = bytes(torn)
            yield from self._wanted(Zeros(whole // self._from * self._to))
        else:
            self._torn = bytes(chunk[whole:])
            yield from self._cast(memoryview(chunk)[:whole])

    def _cast(self, elements: memoryview) -> Iterator[Chunk]:
        step = max(1, self._chunk_nbytes // max(self._from, self._to)) * self._from
        for begin in range(0, len(elements), step):
            data = cast_bytes(elements[begin : begin + step], self._source, self._target)
            # One element may be longer than a chunk may be.
            for at in range(0, len(data), self._chunk_nbytes):
                yield from self._wanted(data[at : at + self._chunk_nbytes])

    def _wanted(self, chunk: Chunk) -> Iterator[Chunk]:
        begin = min(self._skip, len(chunk))
        end = min(len(chunk), begin + self._left)
        self._skip -= begin
        self._left -= end - begin
        if begin < end:
            yield Zeros(end - begin) if isinstance(chunk, Zeros) else memoryview(chunk)[begin:end]


def load_casts(pairs: Iterable[tuple[int, int]]) -> None:
    """Import what casts from and to these dtypes take, so that whoever looks at memory next counts it."""
    for source, target in pairs:
        cast_bytes(memoryview(bytes(BITS[source] // 8)), source, target)


def cast_bytes(elements: memoryview, source: int, target: int) -> memoryview:
    """Elements of dtype ``source`` as elements of dtype ``target``, as bytes.

    ``source`` is a float of any width above four bits; ``target`` is float16, bfloat16, float32 or float64.

    Copies: the result, and one float32 for each element in between where neither is float32.
    """
    # Overflow to infinity is what was asked for; a signalling NaN is no reason to warn.
    with np.errstate(all="ignore"):
        result = _narrow(_widen(elements, source), source, target)
    return memoryview(result.view(np.uint8))


def _widen(elements: memoryview, source: int) -> _Float32:
    if source == F16:
        values: _Float32 = np.frombuffer(elements, "<f2").astype("<f4")
        nans = np.isnan(values)
        if nans.any():
            values.view("<u4")[nans] |= 0x0040_0000  # NumPy keeps a signalling NaN
        return values
    if source == BF16:
        bits: NDArray[np.uint32] = np.frombuffer(elements, "<u2").astype("<u4")
        bits <<= 16  # a bfloat16 is the upper half of a float32
        return bits.view("<f4")
    if source == F64:
        return np.frombuffer(elements, "<f8").astype("<f4")
    if source == F32:
        return np.frombuffer(elements, "<f4")
    return _float8_values(source)[np.frombuffer(elements, np.uint8)]


@cache
def _float8_values(dtype: int) -> _Float32:
    """The float32 of each of the 256 values of a float8."""
    patterns = np.arange(256, dtype=np.uint8)
    if dtype == F8_E5M2:
        return _widen((patterns.astype("<u2") << 8).view(np.uint8).data, F16)
    import ml_dtypes

    values: _Float32 = patterns.view(getattr(ml_dtypes, DTYPES[dtype].ml_dtypes or "")).astype("<f4")
    nans = np.isnan(values)
    signs = patterns.astype("<u4") >> 7 << 31 if DTYPES[dtype].name == "float8_e4m3fn" else np.zeros(256, "<u4")
    values.view("<u4")[nans] = signs[nans] | _FLOAT8_NANS[dtype]
    return values


def _narrow(values: _Float32, source: int, target: int) -> NDArray[np.generic]:
    if target == F64:
        return values.astype("<f8")
    if target == F32:
        return values
    nans = np.isnan(values)
    if target == BF16:
        import ml_dtypes

        rounded: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view("<u2")
        rounded[nans] = 0xFFFF if source in (F32, F64) else 0x7FC0
        return rounded
    half = values.astype("<f2")
    if nans.any():
        bits = values.view("<u4")[nans]
        # Sign, quiet bit, and the upper nine bits of the payload below it.
        half.view("<u2")[nans] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x1FF)
    return half
