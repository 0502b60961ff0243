"""From the tensors that a checkpoint's pickle describes to a catalog, and to how each of them is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stream_pack.errors import LimitError, SourceError, TruncatedSourceError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import DTYPES
from stream_pack.pickles.globals import Storage, Tensor
from stream_pack.pickles.state_dict import StateDict
from stream_pack.pipeline.geometry import Recipe, recipe

__all__ = ["TorchTensors", "catalog_tensors"]


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensors:
    """The catalog, and what its storages are.

    Views of a storage share it; everything else is *derived*.  ``storages``: torch's own and then those in the pickle,
    by number.  ``recipes`` and ``made_from``: of each derived storage.  ``derived``: the numbers of all that are made
    from one of ``storages``.
    """

    catalog: Catalog
    storages: list[Storage]
    recipes: Mapping[int, Recipe]
    made_from: Mapping[int, Storage]
    derived: Mapping[Storage, list[int]]


def catalog_tensors(
    state_dict: StateDict, storages: Mapping[str, Storage], *, big_endian: bool, file_nbytes: int | None
) -> TorchTensors:
    """Check every tensor's geometry, and list them.

    Storages are numbered in the order of ``storages``, those in the pickle after them.  ``file_nbytes``: the length of
    the file that holds the former, if they are stored as they are and it is known.

    A tensor whose geometry no pack can hold is refused, if it is taken.

    Raises: TruncatedSourceError.
    """
    storages_nbytes = sum(storage.nbytes for storage in storages.values())
    if file_nbytes is not None and storages_nbytes > file_nbytes:
        raise TruncatedSourceError(
            f"the checkpoint's storages have {storages_nbytes} bytes, the file only {file_nbytes}: "
            "it was cut short, or only some of its records are compressed (then pipe it in: cat FILE | ...)"
        )
    in_pickle = dict.fromkeys(t.storage for t in state_dict.tensors.values() if t.storage.data is not None)
    numbered = [*storages.values(), *in_pickle]
    storages_nbytes += sum(storage.nbytes for storage in in_pickle)
    builder = _Builder(numbered, big_endian=big_endian)
    for name, tensor in state_dict.tensors.items():
        try:
            builder.add(name, tensor)
        except (SourceError, LimitError) as error:
            builder.catalog.refuse(name, error)
    for name, reason in state_dict.refused:
        builder.catalog.refuse(name, reason)
    catalog = builder.catalog.build(storages_nbytes=storages_nbytes)
    return TorchTensors(catalog, numbered, builder.recipes, builder.made_from, builder.derived)


class _Builder:
    """Collects what :class:`TorchTensors` holds."""

    def __init__(self, storages: list[Storage], *, big_endian: bool) -> None:
        self.catalog = CatalogBuilder()
        self.recipes: dict[int, Recipe] = {}
        self.made_from: dict[int, Storage] = {}
        self.derived: dict[Storage, list[int]] = {}
        self._numbers = {storage: number for number, storage in enumerate(storages)}
        self._known: dict[tuple[int, Recipe], int] = {}
        self._big_endian = big_endian

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises: SourceError, LimitError."""
        storage = tensor.storage
        number, start = self._numbers[storage], 0
        if 0 not in tensor.shape:
            made = recipe(
                name,
                dtype=tensor.dtype,
                offset=tensor.offset,
                shape=tensor.shape,
                strides=tensor.strides,
                storage_nbytes=storage.nbytes,
                big_endian=self._big_endian and storage.data is None,
                conj=tensor.conj,
                neg=tensor.neg,
            )
            if made.contiguous:
                start = made.start
            else:
                number = self._derive(storage, number, made)
        shape = tensor.shape
        if DTYPES[tensor.dtype].torch_pairs and shape:
            shape = (*shape[:-1], 2 * shape[-1])
        self.catalog.add(name, tensor.dtype, shape, storage=number, start=start)

    def _derive(self, storage: Storage, number: int, made: Recipe) -> int:
        """The number of what ``made`` makes of the storage."""
        new = self._known.setdefault((number, made), len(self._numbers) + len(self._known))
        if new not in self.recipes:
            self.recipes[new] = made
            self.made_from[new] = storage
            self.derived.setdefault(storage, []).append(new)
            self.catalog.derive(new, of=number, begin=made.start, end=made.end)
        return new
