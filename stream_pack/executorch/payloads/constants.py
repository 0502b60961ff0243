"""What a delegate's graph wants of its constants, and a source that gives just that, in the graph's order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from stream_pack.errors import SourceError, UnsupportedTensorError
from stream_pack.format.catalog import Catalog, tensor_nbytes
from stream_pack.format.dtypes import BITS, BY_NAME, DTYPES
from stream_pack.format.limits import MAX_RANK
from stream_pack.pipeline.adapt.cast_plan import cast_catalog
from stream_pack.pipeline.adapt.select import take_rows
from stream_pack.pipeline.adapt.source import AdaptedSource
from stream_pack.pipeline.source import Source
from stream_pack.sources.memory.source import LiveSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Constant", "Constants", "check_named", "constants_source", "open_constants"]

Constants: TypeAlias = "Mapping[int, object] | Mapping[str, object] | Source"
"""torch tensors or NumPy arrays by the number or key that a graph gives them, or a source whose names are these."""

_F16, _F32, _F64 = (BY_NAME[name] for name in ("float16", "float32", "float64"))
_CASTS = {_F16: (_F32, _F64), _F32: (_F64,)}
"""What a graph may ask for, and what it may be made from: what ExecuTorch itself does, or should have done."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant of a graph: ``label`` is what the graph calls it, for messages.

    ``keys`` are what the tensor may be called in the source; ``name`` is what it is called in the pack.
    ``dtype`` is a number in :data:`stream_pack.format.dtypes.DTYPES`; None takes what comes.  ``dims`` likewise.
    ``nbytes`` is the length in bytes that the graph asks for, if it does.
    """

    label: str
    keys: tuple[str, ...]
    name: str
    dtype: int | None = None
    dims: tuple[int, ...] | None = None
    nbytes: int | None = None


def open_constants(constants: Constants) -> Source:
    """The source that ``constants`` is, or holds.  Raises: SourceError for a key that is neither number nor text."""
    if isinstance(constants, Source):
        return constants
    named: dict[str, object] = {}
    for key, tensor in constants.items():
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise SourceError(
                f"the key {key!r} is a {type(key).__qualname__}: constants go by the numbers or keys of their graph"
            )
        if str(key) in named:
            raise SourceError(f"two constants are called {str(key)!r}, as a number and as text")
        named[str(key)] = tensor
    return LiveSource(named)


def constants_source(source: Source, wanted: Sequence[Constant]) -> Source:
    """``source`` with the constants ``wanted``, and no others, in their order and under their names.

    Floats are cast on the way where the graph asks for a narrower one that ExecuTorch casts to; bytes of packed 4-bit
    elements take the graph's dtype and dims.

    Memory: one more chunk.  Lifetime: what is returned owns ``source``.
    Raises: SourceError when a constant is missing, or there is one too many; UnsupportedTensorError for one that is
    not what the graph says it is, or is empty.
    """
    catalog = source.catalog
    _check_names(wanted)
    rows = _rows(catalog, wanted)
    # A tensor may serve several constants, which the catalog takes for tied ones.
    taken = take_rows(catalog, rows, [constant.name for constant in wanted])
    fitted = [_fit(constant, taken, row) for row, constant in enumerate(wanted)]
    described = replace(
        taken,
        dtypes=np.array([fit.dtype for fit in fitted], np.uint8),
        dims=np.array([dim for fit in fitted for dim in fit.dims], np.int64),
        dims_ends=np.cumsum([len(fit.dims) for fit in fitted], dtype=np.int64),
    )
    if all(fit.cast is None for fit in fitted):
        return AdaptedSource(source, described, None)
    # Rules match names; what each constant becomes is its name here.
    rules = [(DTYPES[target].name, target) for target in _CASTS]
    targets = ["" if fit.cast is None else DTYPES[fit.cast].name for fit in fitted]
    return AdaptedSource(source, *cast_catalog(described, rules, targets))


@dataclass(frozen=True, slots=True)
class _Fit:
    """How a tensor serves as a constant: what its bytes are called, and what they are cast to."""

    dtype: int
    dims: tuple[int, ...]
    cast: int | None = None


def _fit(constant: Constant, catalog: Catalog, row: int) -> _Fit:
    """Prove that the tensor in ``row`` is what the graph says of ``constant``."""
    dtype, shape, nbytes = int(catalog.dtypes[row]), catalog.shape(row), int(catalog.nbytes[row])
    if nbytes == 0:
        raise _unfit(constant, f"has shape {list(shape)} and no bytes, which the runtime aborts on")
    if constant.nbytes is not None and nbytes != constant.nbytes:
        raise _unfit(constant, f"has {nbytes} bytes, the graph says {constant.nbytes}")
    target = dtype if constant.dtype is None else constant.dtype
    cast = target if dtype in _CASTS.get(target, ()) else None
    if cast is None and dtype != target:
        if BITS[target] != 4 or DTYPES[dtype].name not in ("uint8", "int8"):
            raise _unfit(constant, f"is {DTYPES[dtype].name}, the graph says {DTYPES[target].name}")
        dtype = target  # bytes, each of two packed elements
    if constant.dims is None:
        return _Fit(dtype, shape, cast)
    elements = nbytes * 8 // BITS[dtype]
    if elements != math.prod(constant.dims):
        raise _unfit(
            constant,
            f"has shape {list(shape)}, {elements} elements; the graph says {list(constant.dims)}",
        )
    if len(constant.dims) > MAX_RANK:
        raise _unfit(
            constant, f"has {len(constant.dims)} dims in the graph: the limit is {MAX_RANK}"
        )
    tensor_nbytes(constant.name, dtype, constant.dims)  # proves each dim, of which two may be -1
    return _Fit(dtype, constant.dims, cast)


def _rows(catalog: Catalog, wanted: Sequence[Constant]) -> NDArray[np.intp]:
    """Where in ``catalog`` each wanted constant stands."""
    there = {name: row for row, name in enumerate(catalog.names)}
    rows = [
        next((there[key] for key in constant.keys if key in there), None) for constant in wanted
    ]
    missing = [constant.label for constant, row in zip(wanted, rows, strict=True) if row is None]
    if missing:
        raise SourceError(f"no tensor was given for {_some(missing)} of the graph")
    known = {key for constant in wanted for key in constant.keys}
    extra = [name for name in catalog.names if name not in known]
    if extra:
        raise SourceError(f"the graph has no constant called {_some(list(map(repr, extra)))}")
    for constant in wanted:
        given = [key for key in dict.fromkeys(constant.keys) if key in there]
        if len(given) > 1:
            raise SourceError(
                f"{constant.label} was given twice, as {' and as '.join(map(repr, given))}"
            )
    return np.array(cast("list[int]", rows), np.intp)


def check_named(names: Mapping[int, str] | None, numbers: Collection[int]) -> None:
    """Prove that only constants of the graph were given names.  Raises: SourceError."""
    extra = [repr(number) for number in names or {} if number not in numbers]
    if extra:
        raise SourceError(f"names are given for {_some(extra)}: the graph has no such constant")


def _check_names(wanted: Sequence[Constant]) -> None:
    taken: dict[str, str] = {}
    for constant in wanted:
        if constant.name in taken:
            raise SourceError(
                f"{taken[constant.name]} and {constant.label} would have one name: give each its own"
            )
        taken[constant.name] = constant.label
        try:
            constant.name.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{constant.label} would have a name that is no UTF-8 text") from None


def _unfit(constant: Constant, why: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(f"{constant.label} {why}", tensor=constant.name)


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
