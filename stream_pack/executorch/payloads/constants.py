"""The constants that a delegate's graph names, and a payload with exactly those, in the graph's order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from stream_pack.errors import SourceError, UnsupportedTensorError
from stream_pack.format.catalog import Catalog, tensor_nbytes
from stream_pack.format.dtypes import BITS, BY_NAME, DTYPES
from stream_pack.format.header import HeadKind
from stream_pack.format.header_kinds import Front
from stream_pack.format.limits import MAX_RANK
from stream_pack.format.ragged import Ragged
from stream_pack.pipeline.adapt.cast_plan import cast_catalog
from stream_pack.pipeline.adapt.select import take_rows
from stream_pack.pipeline.adapt.source import AdaptedSource
from stream_pack.pipeline.source import Source
from stream_pack.sources.memory.source import LiveSource
from stream_pack.text import listed, quoted
from stream_pack.writer.convert import convert_with
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.report import Report
from stream_pack.writer.sink import BinaryWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GraphConstant", "Tensors", "name_constants", "write_payload"]

Tensors: TypeAlias = "Mapping[int, object] | Mapping[str, object] | Source"
"""torch tensors or NumPy arrays by their number or key in a graph, or a source in which this is their name."""

_F16, _F32, _F64 = (BY_NAME[name] for name in ("float16", "float32", "float64"))
_CASTS = {_F16: (_F32, _F64), _F32: (_F64,)}
"""A dtype that a graph may ask for -> the dtypes that are cast to it: the casts that ExecuTorch makes."""


@dataclass(frozen=True, slots=True)
class GraphConstant:
    """What a graph says of one of its constants, which messages call ``label``.

    ``keys``: names that the tensor may have in the source, the usual one first.  ``name``: its name in the pack.
    ``dtype`` (a number in :data:`stream_pack.format.dtypes.DTYPES`), ``dims`` and ``nbytes`` (in bytes) are None where
    the graph does not say them: any will do.
    """

    label: str
    keys: tuple[str, ...]
    name: str
    dtype: int | None = None
    dims: tuple[int, ...] | None = None
    nbytes: int | None = None


def name_constants(noun: str, numbers: Collection[int], names: Mapping[int, str] | None) -> list[tuple[int, str, str]]:
    """For each constant ``number`` of a graph: the number, its name in the pack, and its label for messages.

    Raises: SourceError for a name of a constant that the graph does not have.
    """
    names = names or {}
    extra = [str(number) for number in names if number not in numbers]
    if extra:
        raise SourceError(f"names= has entries for {listed(extra)}: the graph has no such constant")
    found = []
    for number in numbers:
        name = names.get(number, str(number))
        also = "" if name == str(number) else f" ({quoted(name)})"
        found.append((number, name, f"{noun} {number}{also}"))
    return found


def write_payload(
    kind: HeadKind,
    encode: Callable[[Sequence[int], Sequence[int]], bytes],
    tensors: Tensors,
    wanted: Sequence[GraphConstant],
    target: str | os.PathLike[str] | int | BinaryWriter,
    options: ConvertOptions,
) -> Report:
    """Stream the constants ``wanted`` into a pack of this kind.

    ``encode(offsets, nbytes)`` gives the flatbuffer of the graph, with its constants at these places, in bytes from the
    region's first one.

    Raises: SourceError and its subclasses, LimitError, OSError; a file at ``target`` is then unchanged.
    """
    front = Front(kind, lambda index: encode(index.offsets.tolist(), index.tensor_nbytes.tolist()))
    with _open(tensors) as source:
        return convert_with(_constants_source(source, wanted), target, options, front=front)


def _open(tensors: Tensors) -> Source:
    """``tensors`` as a source.  Raises: SourceError for a key that is neither number nor text."""
    if isinstance(tensors, Source):
        return tensors
    named: dict[str, object] = {}
    for key, tensor in tensors.items():
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise SourceError(
                f"the key {quoted(key)} is a {type(key).__qualname__}: expected the number of a constant in its "
                "graph, or its key as text"
            )
        if str(key) in named:
            raise SourceError(f"two constants are called {quoted(str(key))}, as a number and as text")
        named[str(key)] = tensor
    return LiveSource(named)


def _constants_source(source: Source, wanted: Sequence[GraphConstant]) -> Source:
    """``source`` with exactly the constants ``wanted``, in their order and under their names.

    Floats are cast to a narrower dtype where the graph asks for one, as ExecuTorch does; bytes of packed 4-bit elements
    get the graph's dtype and dims.

    Memory: one more chunk.  Lifetime: the result owns ``source``.
    Raises: SourceError for a constant that is missing, or not in the graph; UnsupportedTensorError for one that is
    empty, or does not match the graph.
    """
    catalog = source.catalog
    _check_names(wanted)
    rows = _rows(catalog, wanted)
    source.refuse(rows.tolist())
    # One tensor may be several constants, which are then tied.
    taken = take_rows(catalog, rows, [constant.name for constant in wanted])
    fitted = [_fit(constant, taken, row) for row, constant in enumerate(wanted)]
    described = replace(
        taken,
        dtypes=np.array([dtype for dtype, _, _ in fitted], np.uint8),
        dims=Ragged.of(
            np.array([dim for _, dims, _ in fitted for dim in dims], np.int64), [len(dims) for _, dims, _ in fitted]
        ),
    )
    if all(cast is None for _, _, cast in fitted):
        return AdaptedSource(source, described, rows.tolist())
    targets = np.array([dtype if cast is None else cast for dtype, _, cast in fitted], np.uint8)
    described, casts = cast_catalog(described, targets)
    return AdaptedSource(source, described, rows.tolist(), casts)


def _fit(constant: GraphConstant, catalog: Catalog, row: int) -> tuple[int, tuple[int, ...], int | None]:
    """The dtype and dims under which the tensor in ``row`` is taken, and the dtype that it is cast to, if it is.

    Proves that the tensor matches what the graph says of ``constant``.
    """
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
    dims = constant.dims
    if dims is None:
        return dtype, shape, cast
    elements = nbytes * 8 // BITS[dtype]
    if elements != math.prod(dims):
        why = f"has shape {list(shape)}, {elements} elements; the graph says {list(dims)}"
        raise _unfit(constant, why)
    if len(dims) > MAX_RANK:
        raise _unfit(constant, f"has {len(dims)} dims in the graph: the limit is {MAX_RANK}")
    tensor_nbytes(constant.name, dtype, dims)  # proves each dim, of which two may be -1
    return dtype, dims, cast


def _rows(catalog: Catalog, wanted: Sequence[GraphConstant]) -> NDArray[np.intp]:
    """The row of each wanted constant in ``catalog``."""
    row_of = {name: row for row, name in enumerate(catalog.names)}
    given = [[key for key in constant.keys if key in row_of] for constant in wanted]
    missing = [constant.keys[0] for constant, keys in zip(wanted, given, strict=True) if not keys]
    if missing:
        raise SourceError(f"tensors are missing for the graph's constants: {listed(missing)}")
    extra = list(row_of.keys() - {key for constant in wanted for key in constant.keys})
    if extra:
        raise SourceError(f"the graph has no constant called {listed(sorted(extra))}")
    for constant, keys in zip(wanted, given, strict=True):
        if len(set(keys)) > 1:
            raise SourceError(f"{constant.label} was given twice, as {' and as '.join(map(quoted, keys))}")
    return np.array([row_of[keys[0]] for keys in given], np.intp)


def _check_names(wanted: Sequence[GraphConstant]) -> None:
    taken: dict[str, str] = {}
    for constant in wanted:
        if constant.name in taken:
            raise SourceError(f"{taken[constant.name]} and {constant.label} would have one name: give each its own")
        taken[constant.name] = constant.label
        try:
            constant.name.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{constant.label} would have a name that is not valid UTF-8") from None


def _unfit(constant: GraphConstant, why: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(f"{constant.label} {why}", tensor=constant.name)
