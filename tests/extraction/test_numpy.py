"""NumPy's files, held against NumPy."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack.errors import LimitError, SourceError
from stream_pack.format.dtypes import DTYPES

ARRAYS = [np.dtype(dtype.numpy) for dtype in DTYPES if dtype.numpy is not None]


@pytest.mark.parametrize("dtype", ARRAYS, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_a_npy_is_the_one_that_numpy_writes(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], tmp_path: Path
) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    array = (np.arange(count, dtype=np.uint8) % (2 if dtype.kind == "b" else 251)).view(dtype).reshape(shape)
    stream_pack.save_file({"w": array}, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "w.npy")
    wanted = io.BytesIO()
    np.save(wanted, array)
    assert (tmp_path / "w.npy").read_bytes() == wanted.getvalue()


def test_a_npy_can_be_mapped(tmp_path: Path) -> None:
    stream_pack.save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "w.npy")
    assert np.load(tmp_path / "w.npy", mmap_mode="r").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_several_tensors_are_an_npz_under_their_names(tmp_path: Path) -> None:
    arrays = {"a": np.arange(3), "b/c": np.ones((2, 2), np.float32), "": np.empty((0, 1)), "é": np.array(True)}
    stream_pack.save_file(arrays, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.npz")
    with np.load(tmp_path / "o.npz") as archive:
        found: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = dict(archive)
    assert list(found) == list(arrays)
    for name, wanted in arrays.items():
        array = np.asarray(wanted)
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_several_tensors_are_no_npy(tmp_path: Path) -> None:
    stream_pack.save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "pack")
    with pytest.raises(SourceError, match="2 tensors are selected: name one, or extract --to npz"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "o.npy")


def test_a_name_that_no_archive_takes_is_refused(tmp_path: Path) -> None:
    stream_pack.save_file({"n" * 65_532: torch.ones(1)}, tmp_path / "pack")
    with pytest.raises(LimitError, match=r"a name of 65536 bytes: a zip archive takes at most 65535"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "o.npz")
