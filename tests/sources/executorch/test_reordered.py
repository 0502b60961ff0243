"""Tensors of ExecuTorch's that are not row-major in the file: they come out as the module has them."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack import LimitError, UnsupportedTensorError
from stream_pack.et_files.constants import Constants
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.ragged import Ragged
from stream_pack.sources.executorch.catalog import catalog_constants
from stream_pack.sources.open import open_source
from tests.sources.byte_sources import Dribble
from tests.sources.source_suite import Expected, MakeSource, SourceSuite
from tests.support.et_files import DataTensor, Named, data_file
from tests.support.spools import without_a_folder

VECTORS = Path(__file__).parent.parent.parent / "vectors" / "executorch"


def numbers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array whose elements all differ, as far as they can."""
    itemsize = DTYPES[BY_NAME[dtype]].bits // 8
    count = int(np.prod(shape))
    data = np.arange(1, 1 + count, dtype=np.uint64).view(np.uint8).reshape(-1, 8)[:, :itemsize]
    return np.ascontiguousarray(data).view(f"u{itemsize}").reshape(shape)


TENSORS = [
    ("rows", "float32", (3, 5), (0, 1)),
    ("channels_last", "float32", (8, 3, 3, 3), (0, 2, 3, 1)),
    ("one_byte", "int8", (4, 6), (1, 0)),
    ("two_bytes", "bfloat16", (2, 3, 4), (2, 0, 1)),
    ("eight_bytes", "int64", (3, 2, 5), (1, 2, 0)),
    ("channels_last_3d", "float16", (2, 3, 2, 2, 4), (0, 2, 3, 4, 1)),
    ("one_by_one", "float32", (8, 3, 1, 1), (0, 2, 3, 1)),
    ("nothing", "float32", (2, 0, 3), (2, 1, 0)),
    ("vector", "float32", (7,), (0,)),
    ("scalar", "float32", (), ()),
    ("reversed", "uint16", (2, 3, 4, 5), (3, 2, 1, 0)),
]


def stored() -> list[DataTensor]:
    return [
        DataTensor(name, dtype, shape, order, numbers(dtype, shape).transpose(order).tobytes())
        for name, dtype, shape, order in TENSORS
    ]


def in_the_module() -> dict[str, Expected]:
    return {name: Expected(dtype, shape, numbers(dtype, shape).tobytes()) for name, dtype, shape, _ in TENSORS}


class TestReordered(SourceSuite):
    """A .ptd in a file."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        (tmp_path / "weights.ptd").write_bytes(data_file(stored()))
        return lambda: open_source(tmp_path / "weights.ptd")

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return in_the_module()


class TestReorderedInPipe(TestReordered):
    chooses_order: ClassVar[bool] = False

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        data = data_file(stored())
        return lambda: open_source(Dribble(data, step=29))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_every_order_of_every_dim_comes_out_row_major(rank: int, tmp_path: Path) -> None:
    shape = (3, 3, 3, 2)[:rank]
    array = numbers("int32", shape)
    orders = list(itertools.permutations(range(rank)))
    data = data_file(
        [DataTensor(str(order), "int32", shape, order, array.transpose(order).tobytes()) for order in orders]
    )
    (tmp_path / "weights.ptd").write_bytes(data)
    for source in (tmp_path / "weights.ptd", Dribble(data, step=4096)):
        stream_pack.convert(source, tmp_path / "pack", spool_dir=tmp_path)
        loaded = stream_pack.load_file(tmp_path / "pack")
        assert list(loaded) == [str(order) for order in orders]
        for tensor in loaded.values():
            assert tensor.is_contiguous()
            assert np.array_equal(tensor.numpy(), array.view(np.int32))


def test_one_segment_may_be_several_tensors_in_different_orders(tmp_path: Path) -> None:
    # Equal bytes under three layouts: as a matrix, as its transpose, and plain.
    data = data_file(
        [DataTensor("rows", "float32", (2, 3), (0, 1), np.arange(6, dtype="<f4").tobytes())],
        also=[Named("columns", 0, 6, (3, 2), (1, 0)), Named("again", 0, 6, (3, 2), (1, 0)), Named("bytes", 0)],
    )
    (tmp_path / "weights.ptd").write_bytes(data)
    for source in (tmp_path / "weights.ptd", Dribble(data, step=7)):
        report = stream_pack.convert(source, tmp_path / "pack", spool_dir=tmp_path)
        with stream_pack.open(tmp_path / "pack") as pack:
            assert pack["rows"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
            assert pack["columns"].numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
            assert pack["bytes"].raw() == pack["rows"].raw()
            assert pack["bytes"].file_offset == pack["rows"].file_offset
            assert pack["again"].file_offset == pack["columns"].file_offset != pack["rows"].file_offset
        assert report.tied == 2


def test_a_program_has_channels_last_constants_as_its_module_has_them(tmp_path: Path) -> None:
    data = (VECTORS / "programs" / "channels_last.pte").read_bytes()
    for source in (VECTORS / "programs" / "channels_last.pte", Dribble(data, step=4096)):
        stream_pack.convert(source, tmp_path / "pack", spool_dir=tmp_path)
        with stream_pack.open(tmp_path / "pack") as pack:
            (view,) = pack.values()
            assert np.array_equal(view.numpy(), np.arange(48, dtype=np.float32).reshape(2, 3, 2, 4))
            assert pack.notes(view.name) == {"executorch.dim_order": "[0, 2, 3, 1]"}


def test_a_ptd_that_is_row_major_now_is_warned_of(tmp_path: Path) -> None:
    source = VECTORS / "programs" / "channels_last.pte"
    assert stream_pack.convert(source, tmp_path / "pack").warnings == ()
    predicted = stream_pack.forecast(tmp_path / "pack", to="ptd")
    report = stream_pack.convert(tmp_path / "pack", tmp_path / "ptd", to="ptd")
    assert report.warnings == predicted.warnings
    assert "in another dim order" in " ".join(report.warnings)
    with stream_pack.open(tmp_path / "ptd", kind="ptd") as data_file_again:
        (view,) = data_file_again.values()
        assert (view.shape, view.dim_order) == ((2, 3, 2, 4), None)
        assert np.array_equal(view.numpy(), np.arange(48, dtype=np.float32).reshape(2, 3, 2, 4))


@pytest.mark.usefixtures("spools_on_disk")
def test_a_pipe_waits_for_one_tensor_at_a_time(tmp_path: Path) -> None:
    array = np.arange(40_000, dtype="<f4").reshape(200, 200)
    columns = array.transpose(1, 0).tobytes()
    data = data_file(
        [
            DataTensor("a", "float32", (200, 200), (1, 0), columns),
            DataTensor("rows", "float32", (200, 200), (0, 1), array.tobytes()),
            DataTensor("b", "float32", (100, 100), (1, 0), columns[:40_000]),
        ]
    )
    report = stream_pack.convert(Dribble(data, step=4096), tmp_path / "pack")
    assert report.spool_nbytes == 160_000
    assert stream_pack.forecast(Dribble(data, step=4096)).spool_nbytes == 160_000
    assert stream_pack.convert(Dribble(data, step=4096), tmp_path / "rows", include="rows").spool_nbytes == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack", "rows"]


def test_a_cast_is_of_the_tensor_that_was_gathered(tmp_path: Path) -> None:
    array = np.arange(24, dtype="<f4").reshape(2, 3, 4) / 7
    tensor = DataTensor("w", "float32", (2, 3, 4), (2, 0, 1), array.transpose(2, 0, 1).tobytes())
    (tmp_path / "weights.ptd").write_bytes(data_file([tensor]))
    stream_pack.convert(tmp_path / "weights.ptd", tmp_path / "pack", dtype="f16")
    expected = torch.from_numpy(array).to(torch.float16)
    assert torch.equal(stream_pack.load_file(tmp_path / "pack")["w"], expected)


def test_what_is_no_order_of_the_dims_is_refused_by_name(tmp_path: Path) -> None:
    tensors = [
        DataTensor("twice", "float32", (2, 2), (1, 1), bytes(16)),
        DataTensor("outside", "float32", (2, 2), (0, 2), bytes(16)),
        DataTensor("w", "float32", (2, 2), (1, 0), bytes(16)),
    ]
    (tmp_path / "weights.ptd").write_bytes(data_file(tensors))
    with pytest.raises(UnsupportedTensorError, match=r"'twice' has the dim order \[1, 1\] for 2 dims") as caught:
        stream_pack.convert(tmp_path / "weights.ptd", tmp_path / "pack")
    assert caught.value.tensor == "twice"
    stream_pack.convert(tmp_path / "weights.ptd", tmp_path / "pack", exclude=["twice", "outside"])
    assert [damage.tensors for damage in stream_pack.verify(tmp_path / "weights.ptd").damages] == [
        ("twice",),
        ("outside",),
    ]


def test_more_dims_than_numpy_has_are_refused(tmp_path: Path) -> None:
    # 33 dims of 2, none of which merges with its neighbour: 32 GiB, so only the catalog is made.
    rank = 33
    constants = Constants(
        ["w"],
        np.array([BY_NAME["float32"]], np.int16),
        Ragged.of(np.full(rank, 2, np.int64), [rank]),
        np.zeros(1, np.int64),
        np.full(1, 4 * 2**rank, np.int64),
        orders={0: tuple(range(rank))[::-1]},
    )
    refused = catalog_constants(constants).catalog.refused
    assert str(refused[0]) == "tensor 'w' has 33 dims that are not contiguous: the limit is 32"


def test_a_stream_to_a_stream_says_what_space_it_needs() -> None:
    tensor = DataTensor("w", "float32", (20, 30), (1, 0), bytes(2400))
    with without_a_folder(), pytest.raises(LimitError, match="2400 bytes"):
        stream_pack.convert(Dribble(data_file([tensor]), step=64), io.BytesIO())
