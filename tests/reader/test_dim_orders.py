"""Tensors of a data file that are not row-major: open gives the module's tensor, with strides, and copies nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack import FormatError
from tests.support.et_files import DataTensor, data_file

WEIGHT = torch.arange(8 * 3 * 3 * 3, dtype=torch.float32).reshape(8, 3, 3, 3)
CHANNELS_LAST = (0, 2, 3, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    stored = WEIGHT.permute(CHANNELS_LAST).contiguous().numpy().tobytes()
    plain = DataTensor("plain", "float32", (2, 3), (0, 1), np.arange(6, dtype="<f4").tobytes())
    wrong = DataTensor("wrong", "float32", (2, 3), (1, 2), bytes(24))
    path = tmp_path / "weights.ptd"
    path.write_bytes(data_file([DataTensor("w", "float32", (8, 3, 3, 3), CHANNELS_LAST, stored), plain, wrong]))
    return path


def test_the_view_has_the_shape_of_the_module_and_says_how_its_bytes_lie(path: Path) -> None:
    with stream_pack.open(path, kind="ptd") as pack:
        assert pack["w"].shape == (8, 3, 3, 3)
        assert pack["w"].dim_order == CHANNELS_LAST
        assert pack["plain"].dim_order is None
        assert pack["w"].raw() == WEIGHT.permute(CHANNELS_LAST).contiguous().numpy().tobytes()


def test_arrays_and_tensors_are_those_of_the_module_in_place(path: Path) -> None:
    with stream_pack.open(path, kind="ptd") as pack:
        view = pack["w"]
        address = np.frombuffer(view.raw(), np.uint8).ctypes.data
        array, tensor = view.numpy(), view.torch()
        assert np.array_equal(array, WEIGHT.numpy())
        assert array.ctypes.data == address
        assert not array.flags.writeable
        assert array.strides == tuple(4 * stride for stride in tensor.stride())
        assert torch.equal(tensor, WEIGHT)
        assert tensor.stride() == WEIGHT.to(memory_format=torch.channels_last).stride()
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert tensor.data_ptr() == view.torch().data_ptr()
        assert tensor.untyped_storage().nbytes() == WEIGHT.nbytes
        assert np.array_equal(np.asarray(view), WEIGHT.numpy())
        writable = view.numpy(writable=True)
        writable[1, 2, 0, 1] = -1
        assert writable[1, 2, 0, 1] == tensor[1, 2, 0, 1] == -1  # one copy-on-write memory
        assert array[1, 2, 0, 1] == WEIGHT[1, 2, 0, 1]  # the file never changes


def test_copies_keep_the_strides(path: Path) -> None:
    with stream_pack.open(path, kind="ptd") as pack:
        copies = [pack["w"].materialize()]
        pack._contents.faults.clear()  # type: ignore[attr-defined]
        copies.append(pack.materialize()["w"])
    for copy in copies:
        assert torch.equal(copy, WEIGHT)
        assert copy.is_contiguous(memory_format=torch.channels_last)


def every_key(dim: int) -> list[int | slice]:
    return [slice(None), 0, -1, slice(1, 2), slice(1, dim)]


def is_one_piece(array: np.ndarray[Any, Any]) -> bool:
    """Whether the bytes of an array of at least one element follow each other, in whatever order."""
    last = sum((dim - 1) * stride for dim, stride in zip(array.shape, array.strides))
    return bool(last + array.itemsize == array.nbytes)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_a_slice_is_that_of_the_tensor_or_refused(order: tuple[int, ...], tmp_path: Path) -> None:
    array = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    tensor = DataTensor("w", "float32", (2, 3, 4), order, array.transpose(order).tobytes())
    (tmp_path / "w.ptd").write_bytes(data_file([tensor]))
    served = 0
    with stream_pack.open(tmp_path / "w.ptd", kind="ptd") as pack:
        view = pack["w"]
        for key in itertools.product(*map(every_key, array.shape)):
            wanted = array[key]
            if not is_one_piece(array.transpose(order).copy().transpose(np.argsort(order))[key]):
                with pytest.raises(IndexError, match="not contiguous"):
                    view[key]
                continue
            part = view[key]
            served += 1
            assert part.shape == wanted.shape
            assert np.array_equal(part.numpy(), wanted)
            assert np.array_equal(part.torch().numpy(), wanted)
            assert part.nbytes == wanted.nbytes
        assert np.array_equal(view[..., 0:4].numpy(), array)
        empty = [slice(None)] * 3
        empty[order[0]] = slice(1, 1)
        assert view[tuple(empty)].numpy().shape == array[tuple(empty)].shape
    assert served > 30


def test_what_is_no_order_of_the_dims_is_bytes_only(path: Path) -> None:
    with stream_pack.open(path, kind="ptd") as pack:
        for typed in (pack["wrong"].numpy, pack["wrong"].torch, pack.materialize):
            with pytest.raises(FormatError, match=r"'wrong' has the dim order \[1, 2\] for 2 dims"):
                typed()
        assert pack["wrong"].raw() == bytes(24)


def test_inspect_shows_the_sizes_and_the_order(path: Path) -> None:
    inspection = stream_pack.inspect(path)
    row, plain, _ = inspection.rows
    assert (row.shape, row.dim_order, plain.dim_order) == ((8, 3, 3, 3), CHANNELS_LAST, None)
    line = next(line for line in inspection.to_text().splitlines() if line.startswith("w "))
    assert "[8, 3, 3, 3]" in line
    assert line.endswith("dim order 0 2 3 1")


def test_inspect_shows_the_notes_of_tensors(tmp_path: Path) -> None:
    programs = Path(__file__).parent.parent / "vectors" / "executorch"
    stream_pack.convert(programs / "xnnpack" / "linear_dynamic_qcs8.pte", tmp_path / "pack")
    inspection = stream_pack.inspect(tmp_path / "pack")
    noted = [row for row in inspection.rows if row.notes]
    assert [row.notes for row in noted] == [{"xnnpack.datatype": "qcint8"}] * 3
    assert inspection.to_text().count("xnnpack.datatype = qcint8") == 3
    raw = stream_pack.inspect(programs / "xnnpack" / "linear_dynamic_qcs8.pte")
    assert [row.notes for row in raw.rows if row.notes] == [{"xnnpack.datatype": "qcint8"}] * 3
