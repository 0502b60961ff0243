"""torch tensors over mapped memory: one storage per buffer, shared by all its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import MissingPackageError
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.text import quoted

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Storages", "empty_tensor", "materialize", "tensor_of", "torch_form"]


class Storages:
    """The torch storages in use, by buffer, held weakly: the last tensor of a storage frees it.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        # Imported once: this is on the way to each tensor.
        self._weak: type[StorageWeakRef] | None = None

    def of(self, buffer: int, make: Callable[[], NDArray[np.uint8]]) -> torch.UntypedStorage:
        """The storage of ``buffer`` in use, else a new one over the array that ``make`` returns."""
        import torch

        if self._weak is None:
            from torch.multiprocessing.reductions import StorageWeakRef

            self._weak = StorageWeakRef
        known = self._known.get(buffer)
        if known is not None:
            # As torch.multiprocessing does: None once the storage is freed.
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
            if storage is not None:
                return storage
        storage = torch.frombuffer(make(), dtype=torch.uint8).untyped_storage()
        self._known[buffer] = self._weak(storage)
        return storage


def torch_form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """torch's dtype and shape for a dtype and a shape of the index.

    Raises: TypeError for a dtype that torch, or this version of it, does not have; MissingPackageError without torch.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError(
            "torch tensors need the package torch, which is not installed: pip install torch; .numpy() and .raw() need "
            "no torch",
            package="torch",
        ) from None

    known = DTYPES[BY_NAME[dtype]] if dtype in BY_NAME else None
    found = None if known is None else getattr(torch, known.torch or "", None)
    if known is None or not isinstance(found, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {quoted(dtype)}: use .raw() for the bytes")
    if known.torch_pairs:
        shape = (*shape[:-1], shape[-1] // 2)
    return found, shape


def tensor_of(
    storage: torch.UntypedStorage, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor over ``nbytes`` bytes from ``start``; a copy if they are misaligned."""
    import torch

    # By way of bytes: an empty tensor of some dtypes cannot be made without a warning.
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (nbytes,), (1,))
    if raw.data_ptr() % dtype.itemsize or start % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of 0 bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).view(shape)


def materialize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of ``tensors`` that share storages as the originals do."""
    copies: dict[int, torch.UntypedStorage] = {}
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in copies:
            copies[key] = storage.clone()  # type: ignore[no-untyped-call]
        result[name] = _over(copies[key], tensor) if tensor.numel() else tensor
    return result


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """The same place of a copy of the tensor's storage, with the same shape and strides."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    flat = tensor_of(storage, start, tensor.nbytes, tensor.dtype, (tensor.numel(),))
    return flat.as_strided(tensor.shape, tensor.stride())
