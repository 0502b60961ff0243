"""The frameworks that ``safe_open`` makes arrays for, besides torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from stream_pack.errors import MissingPackageError, OptionError
from stream_pack.text import quoted

__all__ = ["Convert", "converter"]

Convert = Callable[[NDArray[Any]], Any]

_TORCH, _NUMPY = ("pt", "torch", "pytorch"), ("np", "numpy")
_OTHERS = {
    # framework: package, module, function that takes an array of NumPy's
    "jax": ("jax", "jax.numpy", "asarray"),
    "flax": ("jax", "jax.numpy", "asarray"),
    "mlx": ("mlx", "mlx.core", "array"),
    "tf": ("tensorflow", "tensorflow", "convert_to_tensor"),
    "tensorflow": ("tensorflow", "tensorflow", "convert_to_tensor"),
    "paddle": ("paddlepaddle", "paddle", "to_tensor"),
}
"""The names are those that safetensors accepts."""


def converter(framework: str) -> Convert | None:
    """What makes the framework's own array of an array; None for torch, which has its own way to the bytes.

    Raises: OptionError for an unknown framework; MissingPackageError.
    """
    if framework in _TORCH:
        return None
    if framework in _NUMPY:
        return _as_it_is
    if framework not in _OTHERS:
        raise OptionError(f"framework={framework!r}: expected 'pt', 'np', 'jax', 'flax', 'mlx', 'tf' or 'paddle'")
    package, module, function = _OTHERS[framework]
    try:
        made: Convert = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackageError(
            f"framework={framework!r} needs the package {quoted(package)}, which is not installed: "
            f"pip install {package}",
            package=package,
        ) from None
    return made


def _as_it_is(array: NDArray[Any]) -> NDArray[Any]:
    return array
