"""Tensors that live in the caller's memory as a source: a mapping of names, or a module."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from stream_pack.errors import LimitError, SourceError, StateError, StreamPackError, UnsupportedTensorError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.sources.memory.numpy_arrays import describe_array
from stream_pack.sources.memory.tensor import LiveTensor
from stream_pack.text import quoted

if TYPE_CHECKING:
    import torch

__all__ = ["LiveSource"]

_Range: TypeAlias = tuple[Hashable, tuple[int, int]]
"""A memory, and the half-open range of addresses of one allocation in it."""


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
        self._tensors: dict[tuple[int, int, int], LiveTensor] = {}
        named: list[tuple[str, LiveTensor]] = []
        refused: list[tuple[str, StreamPackError]] = []
        for name, value in _items(tensors):
            try:
                named.append((name, _describe(name, value)))
            except UnsupportedTensorError as error:
                refused.append((name, error))
        super().__init__(self._build(named, refused, metadata), Traits(kind))

    @property
    def verification(self) -> str:
        return "tensors in memory carry no checksum"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        for buffer, (storage, start, nbytes) in enumerate(requests.rows()):
            tensor, begin = self._find(storage, start, nbytes)
            for chunk in tensor.read(begin, begin + nbytes, chunk_nbytes=options.chunk_nbytes):
                yield buffer, chunk

    def close(self) -> None:
        self._tensors = {}

    def _build(
        self,
        named: list[tuple[str, LiveTensor]],
        refused: list[tuple[str, StreamPackError]],
        metadata: Mapping[str, str] | None,
    ) -> Catalog:
        builder = CatalogBuilder()
        allocations, storages_nbytes = _merge_allocations(tensor for _, tensor in named)
        # Numbered as they are met: addresses differ from run to run, a catalog must not.
        numbers: dict[Hashable, int] = {}
        for name, tensor in named:
            first = allocations[tensor.space, tensor.storage]
            begin, end = (address - first for address in tensor.span)
            storage = numbers.setdefault((tensor.space, first), len(numbers))
            if 0 in tensor.shape:
                begin = 0  # its address means nothing
            elif tensor.derivation is not None:
                derived = tensor.space, tensor.derivation
                of, storage = storage, numbers.setdefault(derived, len(numbers))
                builder.derive(storage, of=of, begin=begin, end=end)
                begin = 0
            try:
                nbytes = builder.add(name, tensor.dtype, tensor.shape, storage=storage, start=begin)
            except (SourceError, LimitError) as error:
                builder.refuse(name, error)
            else:
                self._tensors.setdefault((storage, begin, nbytes), tensor)
        for name, reason in refused:
            builder.refuse(name, reason)
        return builder.build(storages_nbytes=storages_nbytes, metadata=metadata)

    def _find(self, storage: int, start: int, nbytes: int) -> tuple[LiveTensor, int]:
        """A tensor that covers the bytes, and where in it they begin."""
        tensor = self._tensors.get((storage, start, nbytes))
        if tensor is not None:
            return tensor, 0
        for (other, begin, length), tensor in self._tensors.items():
            if other == storage and begin <= start and start + nbytes <= begin + length:
                return tensor, start - begin
        raise StateError(
            f"no tensor covers bytes {start} to {start + nbytes} of storage {storage}: "
            "the source is closed, or the request is not made from its catalog"
        )


def _merge_allocations(tensors: Iterable[LiveTensor]) -> tuple[dict[_Range, int], int]:
    """Where the storage begins that each allocation is part of: allocations that overlap are one storage.

    (NumPy and torch may both see one memory, each with bounds of its own.)  Also returns the bytes of all
    storages together.
    """
    begins: dict[_Range, int] = {}
    nbytes = 0
    spaces: dict[Hashable, set[tuple[int, int]]] = {}
    for tensor in tensors:
        spaces.setdefault(tensor.space, set()).add(tensor.storage)
    for space, ranges in spaces.items():
        begin = end = -1  # below every address
        for first, last in sorted(ranges):
            if first >= end:
                begin = end = first
            nbytes += max(0, last - end)
            end = max(end, last)
            begins[space, (first, last)] = begin
    return begins, nbytes


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
