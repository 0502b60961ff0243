"""What a source holds, before any of its bytes are read.

A catalog is columns: tensor ``k`` is row ``k`` of each.  It names the *storage* that a tensor's bytes are in and where
in it they start; what a storage is, only its source knows.  Tensors in a catalog are contiguous, row-major and
little-endian: where the source has to gather, swap or resolve to make them so, the result counts as a storage of its
own (a *derived* storage), and equal transformations of equal bytes are one derived storage.  So the sharing rule needs
nothing but (storage, start, nbytes).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError, SourceError, StreamPackError, UnsupportedTensorError
from stream_pack.format.dtypes import BITS, BY_NAME, DTYPES
from stream_pack.format.limits import MAX_NBYTES, MAX_RANK
from stream_pack.format.names import Names
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = ["Catalog", "CatalogBuilder", "tensor_nbytes"]


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """What tensors there are, in the order of the pack.

    Shapes: ``names``, ``dtypes`` (numbers in :data:`stream_pack.format.dtypes.DTYPES`), ``dims``, ``nbytes``,
    ``storages``, ``starts``: one entry a tensor.  ``derived`` maps each derived storage to the range (storage, begin,
    end) of the source that it is made from (what the limit on blow-up is measured against).  ``storages_nbytes`` is the
    length of all storages that the source holds, used or not.  ``source_dtypes``, if given, are the dtypes that the
    source has, where they are to be cast to ``dtypes`` on the way.  ``metadata`` and ``notes`` (tensor, key, value) go
    into the pack as they are.

    ``refused``: rows that only hold a place, because no pack can hold what the source has under that name, with the
    error to raise if one of them is taken.  Two of these may have one name.

    Units: bytes; ``starts`` counts from the storage's first byte.
    """

    names: Names
    dtypes: NDArray[np.uint8]
    dims: Ragged[np.int64]
    nbytes: NDArray[np.int64]
    storages: NDArray[np.int64]
    starts: NDArray[np.int64]
    derived: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    storages_nbytes: int = 0
    source_dtypes: NDArray[np.uint8] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[tuple[int, str, str]] = ()
    refused: Mapping[int, StreamPackError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The dims of one tensor, outermost first."""
        return tuple(self.dims.row(tensor).tolist())


def tensor_nbytes(name: str, dtype: int, shape: Sequence[int]) -> int:
    """The length of one tensor in bytes, exact.

    Raises: UnsupportedTensorError for a negative dim or four-bit elements that do not fill whole
    bytes, LimitError above 2**62 bytes or elements.
    """
    bits = BITS[dtype]
    elements = 1
    for dim in shape:
        if dim < 0:
            raise UnsupportedTensorError(f"tensor {quoted(name)} has a negative dim: {list(shape)}", tensor=name)
        # An empty tensor's other dims obey the limit too: NumPy and torch multiply them into strides.
        elements *= dim or 1
    if bits < 8 and (not shape or shape[-1] * bits % 8):
        raise UnsupportedTensorError(
            f"tensor {quoted(name)}: {DTYPES[dtype].name} of shape {list(shape)} does not fill whole bytes; "
            "the last dim must be even",
            tensor=name,
        )
    nbytes = elements * bits // 8
    if nbytes > MAX_NBYTES or elements > MAX_NBYTES:
        raise LimitError(
            f"tensor {quoted(name)} of shape {list(shape)} spans {nbytes} bytes: the limit is 2**62",
            value=nbytes,
            limit=MAX_NBYTES,
        )
    return 0 if 0 in shape else nbytes


_PLACE = BY_NAME["uint8"]
"""The dtype of a row that only holds a place."""


class CatalogBuilder:
    """Collects tensors one by one into columns (about 50 bytes a tensor beside its name)."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._names_ends = array("q")
        self._known: set[str] = set()
        self._dtypes = array("B")
        self._dims = array("q")
        self._dims_ends = array("q")
        self._nbytes = array("q")
        self._storages = array("q")
        self._starts = array("q")
        self._derived: dict[int, tuple[int, int, int]] = {}
        self._notes: list[tuple[int, str, str]] = []
        self._refused: dict[int, StreamPackError] = {}

    def __len__(self) -> int:
        return len(self._names_ends)

    def add(
        self,
        name: str,
        dtype: int,
        shape: Sequence[int],
        *,
        storage: int,
        start: int,
        notes: Mapping[str, str] | None = None,
    ) -> int:
        """Append a tensor and return its length in bytes.

        ``dtype`` is a number in :data:`stream_pack.format.dtypes.DTYPES`, ``shape`` counts its elements (for the
        four-bit types: logical ones).

        Raises: SourceError for a name met before or one that is not Unicode text; as :func:`tensor_nbytes`.
        """
        if name in self._known:
            raise SourceError(f"two tensors are named {quoted(name)}: rename one of them")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SourceError(
                f"tensor name {quoted(name)} has a lone surrogate, which UTF-8 cannot encode: rename it"
            ) from None
        if len(shape) > MAX_RANK:
            raise LimitError(
                f"tensor {quoted(name)} has {len(shape)} dims: the limit is {MAX_RANK}",
                value=len(shape),
                limit=MAX_RANK,
            )
        nbytes = tensor_nbytes(name, dtype, shape)
        if notes:
            self._notes.extend((len(self), key, value) for key, value in notes.items())
        self._known.add(name)
        self._append(name, dtype, shape, nbytes, storage=storage, start=start)
        return nbytes

    def refuse(self, name: str, error: StreamPackError) -> None:
        """Append a row for what no pack can hold; ``error`` is raised if it is taken."""
        self._refused[len(self)] = error.with_traceback(None)  # which would keep all that it passed alive
        self._append(name, _PLACE, (0,), 0, storage=0, start=0)

    def _append(self, name: str, dtype: int, shape: Sequence[int], nbytes: int, *, storage: int, start: int) -> None:
        self._names += name.encode("utf-8", "surrogatepass")  # what is refused may have any name
        self._names_ends.append(len(self._names))
        self._dtypes.append(dtype)
        self._dims.extend(shape)
        self._dims_ends.append(len(self._dims))
        self._nbytes.append(nbytes)
        self._storages.append(storage)
        self._starts.append(start)

    def derive(self, storage: int, *, of: int, begin: int, end: int) -> None:
        """Declare ``storage`` as derived from bytes ``[begin, end)`` of the source's own storage ``of``."""
        self._derived[storage] = (of, begin, end)

    def build(self, *, storages_nbytes: int, metadata: Mapping[str, str] | None = None) -> Catalog:
        """The finished columns, which are the builder's own: nothing can be added to it any more."""
        return Catalog(
            names=Names(Ragged(np.asarray(self._names, np.uint8), np.asarray(self._names_ends, np.int64))),
            dtypes=np.asarray(self._dtypes, np.uint8),
            dims=Ragged(np.asarray(self._dims, np.int64), np.asarray(self._dims_ends, np.int64)),
            nbytes=np.asarray(self._nbytes, np.int64),
            storages=np.asarray(self._storages, np.int64),
            starts=np.asarray(self._starts, np.int64),
            derived=self._derived,
            storages_nbytes=storages_nbytes,
            metadata=dict(metadata or {}),
            notes=tuple(self._notes),
            refused=self._refused,
        )
