"""``safe_open`` of safetensors for packs, and :func:`load_file`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stream_pack.errors import OptionError
from stream_pack.reader.frameworks import Convert, converter
from stream_pack.reader.pack import Pack
from stream_pack.reader.pack import open as open_pack
from stream_pack.reader.verify import Progress
from stream_pack.reader.views import View, safetensors_name

if TYPE_CHECKING:
    import torch

__all__ = ["SafeOpen", "SafeSlice", "load_file", "require_backend", "safe_open"]

_BACKENDS = ("mmap", "pread")


def load_file(
    path: str | os.PathLike[str],
    *,
    names: str | Iterable[str] | None = None,
    device: str | int | torch.device = "cpu",
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a pack by name: all in file order, or ``names`` (one, or several in that order).

    ``progress(done, total)`` is called with bytes of tensor data after each tensor, when it is on its device.

    Copies: none on the CPU, where tensors are copy-on-write memory of the file's pages and tied ones share storage; one
    on another device.
    Lifetime: the tensors keep the file mapped; replacing the file is safe, overwriting it in place is not.
    Raises: UnknownTensorError; as :func:`stream_pack.open`.
    """
    with open_pack(path) as pack:
        views = list(pack.values()) if names is None else [pack[name] for name in _several(names)]
        tensors, done, total = {}, 0, sum(view.nbytes for view in views)
        for view in views:
            tensors[view.name] = _on(view.torch(), device)
            done += view.nbytes
            if progress is not None:
                progress(done, total)
        return tensors


def safe_open(
    filename: str | os.PathLike[str],
    framework: str = "pt",
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
) -> SafeOpen:
    """Open a pack as ``safetensors.safe_open`` opens its files; the result is a context manager.

    ``framework``: ``"pt"`` for torch tensors, ``"np"`` for NumPy arrays, both in place and copy-on-write; ``"jax"``
    (``"flax"``), ``"mlx"``, ``"tf"`` and ``"paddle"`` for arrays that these libraries make of NumPy's.  MLX makes
    float32 of float64.
    ``backend``: ``"mmap"`` or ``"pread"``, as in safetensors, without effect: a pack is always mapped.
    Raises: OptionError for another framework or backend, or a device other than the CPU where tensors are not torch's;
    MissingPackageError without the framework's package; as :func:`stream_pack.open`.
    """
    require_backend(backend)
    convert = converter(framework)
    if convert is not None and str(device) != "cpu":
        raise OptionError(f"device={str(device)!r}: expected 'cpu'; only torch tensors are put on other devices")
    return SafeOpen(open_pack(filename), convert, device)


def require_backend(backend: str) -> None:
    """Raises: OptionError for a backend that safetensors does not have."""
    if backend not in _BACKENDS:
        raise OptionError(f"backend={backend!r}: expected 'mmap' or 'pread'")


def _several(names: str | Iterable[str]) -> Iterable[str]:
    # Text is iterable too, by its letters.
    return [names] if isinstance(names, str) else names


def _on(tensor: torch.Tensor, device: str | int | torch.device) -> torch.Tensor:
    return tensor if device == "cpu" else tensor.to(device)


class SafeOpen:
    """An open pack with the methods of ``safetensors.safe_open``.

    Raises (every method): StateError once closed; UnknownTensorError.
    """

    def __init__(self, pack: Pack, convert: Convert | None, device: str | int | torch.device) -> None:
        self._pack = pack
        self._convert = convert  # None: torch's tensors
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

    def get_tensor(self, name: str) -> Any:
        """The tensor; where it is copied, see :func:`safe_open`; on a device other than the CPU it is a copy."""
        return self._made(self._pack[name], ...)

    def get_tensors(self, names: str | Iterable[str] | None = None) -> dict[str, Any]:
        """The tensors of ``names``, or all."""
        return {name: self.get_tensor(name) for name in (self._pack if names is None else _several(names))}

    def get_slice(self, name: str) -> SafeSlice:
        """The tensor, to be sliced before it is read."""
        return SafeSlice(self, self._pack[name])

    def _made(self, view: View, key: Any) -> Any:
        """The part ``key`` of a tensor, as the framework has it."""
        if self._convert is None:
            tensor = view.torch()
            return _on(tensor if key is ... else tensor[key], self._device)
        array = view.numpy(writable=True)
        return self._convert(array if key is ... else array[key])

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

    def __getitem__(self, key: Any) -> Any:
        """A part, indexed like a tensor; only its pages are read."""
        return self._file._made(self._view, key)
