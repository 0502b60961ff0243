"""Tensors that live in the caller's memory as a source: a mapping of names, or a module."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import (
    LimitError,
    SourceChangedError,
    SourceError,
    StateError,
    StreamPackError,
    UnsupportedTensorError,
)
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.ranges import fresh_nbytes, starts_apart
from stream_pack.format.rows import rows
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.geometry import Recipe
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.sources.memory.numpy_arrays import describe_array
from stream_pack.sources.memory.tensor import LiveTensor
from stream_pack.text import quoted

if TYPE_CHECKING:
    import torch

__all__ = ["LiveSource"]


class LiveSource(Source):
    """Torch tensors and NumPy arrays, mixed as they come, or what a module's ``state_dict()`` holds.

    Tensors that share memory share a storage, whichever library they are seen through.

    Copies: none of contiguous CPU tensors and arrays; one chunk at a time of anything else.

    Lifetime: each value is taken from the mapping once and kept until :meth:`close`.  What shares memory is found
    by address, and an address means something only while its owner lives; so a mapping that makes its values
    on demand will have made all of them.  (Tensors that must never exist all at once go through ``Writer``.)
    A tensor that is changed before the pack is written may have some old and some new bytes there.

    A tensor that has no plain bytes, or a value that is no tensor, is refused if it is taken.

    Raises: SourceError for keys that are not text, and for what is neither a mapping nor a module.
    """

    def __init__(
        self,
        tensors: Mapping[str, object] | torch.nn.Module,
        *,
        metadata: Mapping[str, str] | None = None,
        kind: str = "tensors in memory",
    ) -> None:
        self._values: list[object] = []
        names: list[str] = []
        self._described = described = _Described()
        refused: list[tuple[str, StreamPackError]] = []
        for name, value in _items(tensors):
            try:
                described.add(_describe(name, value))
            except UnsupportedTensorError as error:
                refused.append((name, error))
            else:
                self._values.append(value)
                names.append(name)
        super().__init__(_catalog(names, described, refused, metadata), Traits(kind))

    @property
    def verification(self) -> str:
        return "tensors in memory carry no checksum"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        found = zip(self._found(requests), rows(requests.nbytes))
        for buffer, ((tensor, begin), (nbytes,)) in enumerate(found):
            for chunk in tensor.read(begin, begin + nbytes, chunk_nbytes=options.chunk_nbytes):
                yield buffer, chunk

    def _found(self, requests: Requests) -> Iterator[tuple[LiveTensor, int]]:
        """For each request a tensor that covers its bytes, and where in it they begin.  Raises: StateError."""
        for (storage, start, nbytes), (row,) in zip(requests.rows(), rows(_owners(self.catalog, requests))):
            if not 0 <= row < len(self._values):
                raise StateError(
                    f"no tensor covers bytes {start} to {start + nbytes} of storage {storage}: "
                    "the source is closed, or the request is not made from its catalog"
                )
            yield self._again(row), start - self.catalog.starts.item(row)

    def _again(self, row: int) -> LiveTensor:
        """The tensor of a row as it was described before.

        Raises: SourceChangedError when it is another now: its bytes might be taken for elements of the old dtype.
        """
        name, value = self.catalog.names[row], self._values[row]
        tensor, described = _describe(name, value), self._described
        before = (self.catalog.dtypes.item(row), described.begins[row], described.ends[row])
        same = (tensor.dtype, *tensor.span) == before and tensor.space == described.spaces[row]
        if not same or tensor.shape != described.shapes[row] or tensor.derivation != described.derivations.get(row):
            raise SourceChangedError(
                f"tensor {quoted(name)} was given another memory, shape or dtype while it was packed: keep the model "
                "as it is until that has ended, or pack a copy"
            )
        return tensor

    def close(self) -> None:
        self._values = []


class _Described:
    """What is known of live tensors, as columns: a description of each takes 500 bytes."""

    def __init__(self) -> None:
        self.dtypes = bytearray()
        self.shapes: list[tuple[int, ...]] = []
        self.spaces: list[Hashable] = []
        self.begins = array("q")
        self.ends = array("q")
        self.derivations: dict[int, Recipe] = {}
        self._storage_begins = array("q")
        self._storage_ends = array("q")
        self._known_shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, tensor: LiveTensor) -> None:
        if tensor.derivation is not None:
            self.derivations[len(self.shapes)] = tensor.derivation
        self.dtypes.append(tensor.dtype)
        self.shapes.append(self._known_shapes.setdefault(tensor.shape, tensor.shape))
        self.spaces.append(tensor.space)
        self.begins.append(tensor.span[0])
        self.ends.append(tensor.span[1])
        self._storage_begins.append(tensor.storage[0])
        self._storage_ends.append(tensor.storage[1])

    def allocations(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """The number of the storage that each tensor is in, where that begins, and the bytes of all storages together.

        Allocations that overlap are one storage: NumPy and torch may both see one memory, each with bounds of its own.
        """
        numbers: dict[Hashable, int] = {}
        spaces = np.array([numbers.setdefault(space, len(numbers)) for space in self.spaces], np.int64)
        begins, ends = np.asarray(self._storage_begins), np.asarray(self._storage_ends)
        self._storage_begins = self._storage_ends = array("q")  # the rest is needed until the tensors are read
        allocations, firsts = np.zeros_like(begins), np.zeros_like(begins)
        count = nbytes = 0
        order = np.lexsort((ends, begins, spaces))
        for members in np.split(order, np.flatnonzero(np.diff(spaces[order])) + 1):
            apart = starts_apart(begins[members], ends[members])
            nbytes += int(fresh_nbytes(begins[members], ends[members]).sum())
            allocations[members] = count + np.cumsum(apart)
            firsts[members] = begins[members][np.flatnonzero(apart)[np.cumsum(apart) - 1]]
            count += int(apart.sum())
        return allocations, firsts, nbytes


def _catalog(
    names: list[str],
    described: _Described,
    refused: list[tuple[str, StreamPackError]],
    metadata: Mapping[str, str] | None,
) -> Catalog:
    builder = CatalogBuilder()
    allocations, firsts, storages_nbytes = described.allocations()
    # Numbered as they are met: addresses differ from run to run, a catalog must not.
    numbers: dict[Hashable, int] = {}
    for row, (allocation, first, begin, end) in enumerate(
        rows(allocations, firsts, np.asarray(described.begins), np.asarray(described.ends))
    ):
        shape, derivation = described.shapes[row], described.derivations.get(row)
        storage, begin, end = numbers.setdefault(allocation, len(numbers)), begin - first, end - first
        if 0 in shape:
            begin = 0  # its address means nothing
        elif derivation is not None:
            of, storage = storage, numbers.setdefault((described.spaces[row], derivation), len(numbers))
            builder.derive(storage, of=of, begin=begin, end=end)
            begin = 0
        name = names[row]
        try:
            builder.add(name, described.dtypes[row], shape, storage=storage, start=begin)
        except (SourceError, LimitError) as error:
            builder.refuse(name, error)
    for name, reason in refused:
        builder.refuse(name, reason)
    return builder.build(storages_nbytes=storages_nbytes, metadata=metadata)


def _owners(catalog: Catalog, requests: Requests) -> NDArray[np.int64]:
    """For each request the first tensor that has just its bytes, else one that has them among others, else -1."""
    ours, asked = ((places.storages, places.starts, places.nbytes) for places in (catalog, requests))
    columns = [np.concatenate(pair) for pair in zip(ours, asked)]
    order = np.lexsort(columns[::-1])
    changes = np.ones(len(order), bool)
    changes[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.flatnonzero(changes)][np.cumsum(changes) - 1]  # tensors precede the requests equal to them
    owners = first[len(catalog) :]
    for request in np.flatnonzero(owners >= len(catalog)).tolist():
        storage, start, nbytes = (column.item(request) for column in asked)
        begins, ends = catalog.starts, catalog.starts + catalog.nbytes
        around = (catalog.storages == storage) & (begins <= start) & (start + nbytes <= ends)
        owners[request] = np.flatnonzero(around)[0] if around.any() else -1
    return owners


def _items(tensors: Mapping[str, object] | torch.nn.Module) -> Iterable[tuple[str, object]]:
    if not isinstance(tensors, Mapping):
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensors, torch.nn.Module):
            raise SourceError(
                f"expected a mapping of names to tensors or a torch.nn.Module, got {type(tensors).__qualname__}"
            )
        from stream_pack.sources.memory.torch_tensors import module_tensors

        tensors = module_tensors(tensors)
    return tensors.items()


def _describe(name: object, value: object) -> LiveTensor:
    if not isinstance(name, str):
        raise SourceError(f"the key {quoted(name)} is of type {type(name).__qualname__}: tensor names must be strings")
    if isinstance(value, np.ndarray):
        return describe_array(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from stream_pack.sources.memory.torch_tensors import describe_tensor

        return describe_tensor(name, value)
    raise UnsupportedTensorError(
        f"{quoted(name)} is a {type(value).__module__}.{type(value).__qualname__}, neither a torch tensor nor a "
        "NumPy array: remove it or convert it",
        tensor=name,
    )
