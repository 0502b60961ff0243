"""How far the elements of float tensors are apart: both files are read once more, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stream_pack.format.dtypes import BITS, DTYPES
from stream_pack.inspection.difference import ValueDifference
from stream_pack.inspection.fingerprints import options_of
from stream_pack.pipeline.chunks import Zeros
from stream_pack.pipeline.source import Requests, Source
from stream_pack.pipeline.spool import Spool
from stream_pack.writer.needs import Means
from stream_pack.writer.region import in_turn

__all__ = ["FLOATS", "differences_of"]

FLOATS = frozenset(
    number
    for number, dtype in enumerate(DTYPES)
    if dtype.bits >= 8 and dtype.name.startswith(("float", "bfloat")) and (dtype.numpy or dtype.ml_dtypes)
)
"""The dtypes, by number, whose elements have values that NumPy or ml_dtypes knows."""

STEP_ELEMENTS = 1 << 16
"""Compared at once: 2 MiB of float64 for each side, with what the comparison makes of them."""


def differences_of(
    sources: tuple[Source, Source], rows: Sequence[tuple[int, int]], means: Means, spools: tuple[Spool, Spool]
) -> Iterator[ValueDifference]:
    """Of each pair of ``rows``, which have floats and as many elements; each source is streamed.

    Raises: SourceError and its kinds; LimitError; OSError.
    """
    readers = []
    for side, (source, spool) in enumerate(zip(sources, spools)):
        taken = np.array([pair[side] for pair in rows], np.int64)
        readers.append(_Reader(source, taken, means, spool))
    first, second = readers
    for pair in rows:
        shape = sources[0].catalog.shape(pair[0])
        yield _difference(first, second, int(np.prod(shape, dtype=np.int64)))
    for source in sources:
        source.check_unchanged()


class _Reader:
    """The elements of some tensors, one tensor after the other, in steps of any length."""

    def __init__(self, source: Source, rows: NDArray[np.int64], means: Means, spool: Spool) -> None:
        catalog = source.catalog
        requests = Requests(catalog.storages[rows], catalog.starts[rows], catalog.nbytes[rows])
        options = options_of(source, requests, means, spool=spool, in_order=True)
        pieces = source.stream(requests, options)
        self._pieces = in_turn(pieces, requests.nbytes, spool, chunk_nbytes=options.chunk_nbytes)
        self._dtypes = iter(catalog.dtypes[rows].tolist())
        self._rest = memoryview(b"")
        self._dtype = 0

    def next_tensor(self) -> None:
        self._dtype = next(self._dtypes)

    def read(self, elements: int) -> NDArray[np.float64]:
        """The next elements of the tensor."""
        nbytes = elements * BITS[self._dtype] // 8
        data = bytearray()
        while len(data) < nbytes:
            if not self._rest:
                _, chunk = next(self._pieces)
                self._rest = memoryview(bytes(chunk.nbytes) if isinstance(chunk, Zeros) else chunk)
            taken = self._rest[: nbytes - len(data)]
            self._rest = self._rest[len(taken) :]
            data += taken
        return _values(data, self._dtype)


def _values(data: bytearray, dtype: int) -> NDArray[np.float64]:
    known = DTYPES[dtype]
    if known.numpy is not None:
        return np.frombuffer(data, known.numpy).astype(np.float64)
    import ml_dtypes

    return np.frombuffer(data, getattr(ml_dtypes, known.ml_dtypes or "")).astype(np.float64)


def _difference(first: _Reader, second: _Reader, elements: int) -> ValueDifference:
    first.next_tensor()
    second.next_tensor()
    unequal = not_finite = 0
    largest = relative = 0.0
    for begin in range(0, elements, STEP_ELEMENTS):
        count = min(STEP_ELEMENTS, elements - begin)
        a, b = first.read(count), second.read(count)
        differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        finite = differ & np.isfinite(a) & np.isfinite(b)
        unequal += int(differ.sum())
        not_finite += int((differ & ~finite).sum())
        if finite.any():
            apart = np.abs(a[finite] - b[finite])
            largest = max(largest, float(apart.max()))
            relative = max(relative, float((apart / np.maximum(np.abs(a[finite]), np.abs(b[finite]))).max()))
    return ValueDifference(unequal, largest, relative, not_finite)
