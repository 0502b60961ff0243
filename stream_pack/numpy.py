"""``safetensors.numpy`` for packs: a script changes its import and nothing else.

Arrays are given in place, in copy-on-write memory: the file never changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from stream_pack.reader.in_memory import open_bytes
from stream_pack.reader.pack import open as open_pack
from stream_pack.reader.safe_open import require_backend
from stream_pack.reader.verify import Progress
from stream_pack.writer import convert

__all__ = ["load", "load_file", "save", "save_file"]


def save_file(
    tensor_dict: Mapping[str, NDArray[Any]],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Save arrays, of any memory layout, as :func:`stream_pack.save_file` does."""
    convert.save_file(tensor_dict, filename, metadata=metadata, progress=progress)


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, NDArray[Any]]:
    """The arrays of a pack by name, in file order.  ``backend``: as for :func:`stream_pack.safe_open`.

    Copies: none.
    Lifetime: the arrays keep the file mapped; replacing the file is safe, overwriting it in place is not.
    Raises: TypeError for a dtype that neither NumPy nor ml_dtypes has; as :func:`stream_pack.open`.
    """
    require_backend(backend)
    with open_pack(filename) as pack:
        return {name: view.numpy(writable=True) for name, view in pack.items()}


def save(tensor_dict: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the pack that :func:`save_file` would write."""
    return convert.save_bytes(tensor_dict, metadata=metadata)


def load(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a pack that is in memory, by name.

    Copies: one of all bytes; the arrays may be written to.
    Raises: as :func:`load_file`, and OptionError for anything but bytes.
    """
    with open_bytes(data) as pack:
        return {name: view.numpy(writable=True) for name, view in pack.items()}
