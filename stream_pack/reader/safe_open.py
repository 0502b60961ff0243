"""The API of safetensors for packs: :func:`safe_open` and :func:`load_file`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from stream_pack.errors import OptionError
from stream_pack.reader.pack import Pack
from stream_pack.reader.pack import open as open_pack
from stream_pack.reader.views import View, safetensors_name

if TYPE_CHECKING:
    import torch

__all__ = ["SafeOpen", "SafeSlice", "load_file", "safe_open"]

# The names that safetensors accepts.
_TORCH, _NUMPY = ("pt", "torch", "pytorch"), ("np", "numpy")


def load_file(
    path: str | os.PathLike[str], *, names: str | Iterable[str] | None = None, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors of a pack by name: all in file order, or ``names`` (one, or several in that order).

    Copies: none on the CPU, where tensors are copy-on-write memory of the file's pages and tied ones share storage; one
    on another device.
    Lifetime: the tensors keep the file mapped; replacing the file is safe, overwriting it in place is not.
    Raises: UnknownTensorError; as :func:`stream_pack.open`.
    """
    with open_pack(path) as pack:
        views = pack.values() if names is None else [pack[name] for name in _several(names)]
        return {view.name: _on(view.torch(), device) for view in views}


def safe_open(path: str | os.PathLike[str], framework: str = "pt", device: str | torch.device = "cpu") -> SafeOpen:
    """Open a pack as ``safetensors.safe_open`` opens its files; the result is a context manager.

    ``framework``: ``"pt"`` for torch tensors, ``"np"`` for NumPy arrays; both in place and copy-on-write.
    Raises: OptionError for another framework, or a device other than the CPU for NumPy; as :func:`stream_pack.open`.
    """
    if framework not in (*_TORCH, *_NUMPY):
        raise OptionError(f"framework={framework!r}: expected 'pt' or 'np'")
    if framework in _NUMPY and str(device) != "cpu":
        raise OptionError(f"device={str(device)!r}: expected 'cpu', where NumPy arrays are")
    return SafeOpen(open_pack(path), framework in _TORCH, device)


def _several(names: str | Iterable[str]) -> Iterable[str]:
    # Text is iterable too, by its letters.
    return [names] if isinstance(names, str) else names


def _on(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    return tensor if device == "cpu" else tensor.to(device)


class SafeOpen:
    """An open pack with the methods of ``safetensors.safe_open``.

    Raises (every method): StateError once closed; UnknownTensorError.
    """

    def __init__(self, pack: Pack, torch: bool, device: str | torch.device) -> None:
        self._pack = pack
        self._torch = torch
        self._device = device

    def keys(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._pack)

    def offset_keys(self) -> list[str]:
        """All names, in file order: the fastest order to read them in."""
        return list(self._pack)

    def metadata(self) -> dict[str, str] | None:
        """The text attached to the pack, or None."""
        return self._pack.metadata or None

    def get_tensor(self, name: str) -> torch.Tensor | NDArray[Any]:
        """The tensor, in place; on a device other than the CPU, a copy."""
        return self._convert(self._pack[name])

    def get_tensors(self, names: str | Iterable[str] | None = None) -> dict[str, torch.Tensor | NDArray[Any]]:
        """The tensors of ``names``, or all."""
        return {name: self.get_tensor(name) for name in (self._pack if names is None else _several(names))}

    def get_slice(self, name: str) -> SafeSlice:
        """The tensor, to be sliced before it is read."""
        return SafeSlice(self, self._pack[name])

    def _convert(self, view: View) -> torch.Tensor | NDArray[Any]:
        return _on(view.torch(), self._device) if self._torch else view.numpy(writable=True)

    def __enter__(self) -> SafeOpen:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pack.__exit__(*exc)


class SafeSlice:
    """A tensor to be sliced, with the methods of safetensors' slices."""

    def __init__(self, file: SafeOpen, view: View) -> None:
        self._file = file
        self._view = view

    def get_shape(self) -> list[int]:
        """The tensor's dims, outermost first."""
        return list(self._view.shape)

    def get_dtype(self) -> str:
        """The dtype's name in safetensors (``"F32"``), or in the pack where safetensors has none."""
        return safetensors_name(self._view.dtype)

    def __getitem__(self, key: Any) -> torch.Tensor | NDArray[Any]:
        """A part, indexed like a tensor; only its pages are read."""
        if self._file._torch:
            return _on(self._view.torch()[key], self._file._device)
        part: NDArray[Any] = self._view.numpy(writable=True)[key]
        return part
