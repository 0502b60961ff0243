"""mmap-ninja folders: against what mmap_ninja itself opens, and folders whose files contradict each other."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import mmap_ninja
import numpy as np
import pytest
from numpy.typing import NDArray

import stream_pack
from stream_pack.errors import SourceError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.sources.open import open_source
from tests.sources.sets.expectations import read_path
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, catalog_rows

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def random(*shape: int, dtype: str = "float32") -> NDArray[np.generic]:
    return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)


def samples() -> list[NDArray[np.generic]]:
    return [random(2, 3), random(7), random(1, 4, 2), np.empty((3, 0), np.float32), random(1)]


def write_ragged(folder: Path) -> Path:
    mmap_ninja.RaggedMmap.from_lists(folder, samples())
    return folder


def expected_of(array: NDArray[np.generic]) -> Expected:
    return Expected(array.dtype.name, array.shape, array.tobytes())


class TestNumPy(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        mmap_ninja.np_from_ndarray(tmp_path / "a", random(6, 5))
        return lambda: open_source(tmp_path / "a")

    @pytest.fixture
    def expected(self, tmp_path: Path) -> dict[str, Expected]:
        return {"data": expected_of(random(6, 5))}


class TestFortranOrder(TestNumPy):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        mmap_ninja.np_from_ndarray(tmp_path / "a", np.asfortranarray(random(6, 5)))
        assert (tmp_path / "a/order.ninja").read_text() == "F"
        return lambda: open_source(tmp_path / "a")


class TestRagged(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        folder = write_ragged(tmp_path / "r")
        return lambda: open_source(folder)

    @pytest.fixture
    def expected(self, tmp_path: Path) -> dict[str, Expected]:
        opened = mmap_ninja.RaggedMmap(tmp_path / "r")
        return {f"data.{k}": expected_of(opened[k]) for k in range(len(samples()))}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_numpy_comes_out_as_it_went_in(tmp_path: Path, dtype: str) -> None:
    mmap_ninja.np_from_ndarray(tmp_path / "a", random(3, 4, dtype=dtype))
    with open_source(tmp_path / "a") as source:
        assert catalog_rows(source.catalog)[0][1:3] == (dtype, (3, 4))
        assert source.traits.kind == "mmap-ninja numpy"
    assert read_path(tmp_path / "a") == {"data": random(3, 4, dtype=dtype).tobytes()}


def test_a_pack_of_a_ragged_folder_holds_every_sample(tmp_path: Path) -> None:
    report = stream_pack.convert(write_ragged(tmp_path / "r"), tmp_path / "out.pack")
    assert report.source_kind == "mmap-ninja ragged"
    assert report.verification == "the source carries no checksum"
    with stream_pack.open(tmp_path / "out.pack") as pack:
        for number, sample in enumerate(samples()):
            assert np.array_equal(pack[f"data.{number}"].numpy(), sample)


def test_a_folder_that_was_extended_has_all_samples(tmp_path: Path) -> None:
    opened = mmap_ninja.RaggedMmap.from_lists(tmp_path / "r", [random(3), random(5)])
    opened.extend([random(4)])
    assert list(read_path(tmp_path / "r").values()) == [random(n).tobytes() for n in (3, 5, 4)]
    mmap_ninja.np_from_ndarray(tmp_path / "a", random(2, 3))
    mmap_ninja.np_extend_dir(tmp_path / "a", random(4, 3))
    assert read_path(tmp_path / "a") == {"data": random(2, 3).tobytes() + random(4, 3).tobytes()}


def test_single_numbers_are_scalars_whether_or_not_the_other_samples_have_dims(tmp_path: Path) -> None:
    mixed = [np.float32(3), np.ones((2, 3), np.float32)]
    flat = [np.float32(3), np.empty(0, np.float32), np.ones(2, np.float32)]
    for name, arrays in (("mixed", mixed), ("flat", flat)):
        mmap_ninja.RaggedMmap.from_lists(tmp_path / name, arrays)
        with open_source(tmp_path / name) as source:
            shapes = [source.catalog.shape(k) for k in range(len(arrays))]
            assert shapes == [np.asarray(array).shape for array in arrays]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_array_of_no_elements_keeps_its_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    mmap_ninja.np_from_ndarray(tmp_path / "a", np.empty(shape, np.float32))
    with open_source(tmp_path / "a") as source:
        assert catalog_rows(source.catalog) == [("data", "float32", shape, 0)]


def test_a_folder_of_strings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/type.ninja").write_text("string")  # as StringsMmap.from_strings does
    with pytest.raises(UnsupportedCheckpointError, match="type 'string', which does not hold arrays"):
        open_source(tmp_path / "s")


def test_a_data_file_of_another_length_is_never_opened(tmp_path: Path) -> None:
    mmap_ninja.np_from_ndarray(tmp_path / "a", random(2, 3))
    data = tmp_path / "a/data.ninja"
    data.write_bytes(data.read_bytes() + b"\0")
    with pytest.raises(UnsupportedCheckpointError, match=r"has 25 bytes, .* takes 24"):
        open_source(tmp_path / "a")
    data.write_bytes(bytes(23))
    with pytest.raises(TruncatedSourceError, match="has 23 bytes") as caught:
        open_source(tmp_path / "a")
    assert caught.value.missing_nbytes == 1


def write(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


# samples() holds 6 + 7 + 8 + 0 + 1 elements.
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (write("dtype.ninja", b"object"), "dtype is 'object'"),
        (write("dtype.ninja", b"bfloat16"), "dtype is 'bfloat16'"),
        (write("dtype.ninja", b"\xff\n"), "dtype is"),
        (write("dtype.ninja", b"f" * 10_000), "dtype is"),
        (write("order.ninja", b"K"), "order is 'K'"),
        (write("shape.ninja", b"\1\2\3"), "shape.ninja is not a list of lengths"),
        (write("shape.ninja", b"\xff" * 8), "shape.ninja is not a list of lengths"),
        (write("shape.ninja", numbers(*[2**61] * 40)), "2..62"),
        (write("shape.ninja", numbers(2, 11)), "not one-dimensional"),
        (write("shape.ninja", numbers(0)), r"its shape \[0\] of float32 takes 0"),
        (write("starts/data.ninja", numbers(-1, 6, 13, 21, 21)), "a sample is outside"),
        (write("ends/data.ninja", numbers(6, 13, 21, 21, 23)), "a sample is outside"),
        (write("ends/data.ninja", numbers(6, 5, 21, 21, 22)), "a sample is outside"),
        (write("flattened_shapes/data.ninja", numbers(6, 7, 8, 0, 2)), "another length than stated"),
        (write("flattened_shapes/shape.ninja", numbers(4)), "data.ninja has 40 bytes"),
        (write("starts/dtype.ninja", b"float64"), "expected a list of int64"),
        (write("shapes/data.ninja", numbers(3, 3, 7, 1, 4, 2, 3, 0, 1)), r"sample 0 of 6 .* has the shape \[3, 3\]"),
        (write("shapes/data.ninja", numbers(-2, -3, 7, 1, 4, 2, 3, 0, 1)), "sample 0 of 6 elements"),
        (write("shapes/ends/data.ninja", numbers(2, 3, 6, 8, 10)), "is outside the list of dims"),
        (write("shapes/shapes_are_flat.ninja", b"\0\0\0\0"), "nested too deeply"),
        (write("shapes_are_flat.ninja", b"\1\0\0\0"), "not a column of lengths"),
        (lambda folder: shutil.rmtree(folder / "shapes"), "it has no shapes_are_flat.ninja"),
        (lambda folder: (folder / "order.ninja").unlink(), "it has no order.ninja"),
    ],
)  # fmt: skip
def test_a_folder_whose_files_contradict_each_other_is_refused(
    tmp_path: Path, change: Callable[[Path], object], why: str
) -> None:
    folder = write_ragged(tmp_path / "r")
    change(folder)
    with pytest.raises((SourceError, stream_pack.LimitError), match=why):
        open_source(folder)
