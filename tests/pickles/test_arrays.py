"""NumPy arrays in checkpoints: taken where their bytes, dtype and shape say all, else refused, and never rebuilt."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import stream_pack
from stream_pack.errors import SourceError
from tests.pickles.test_optimizers import converted
from tests.sources.torch_save.test_legacy import legacy
from tests.support.torch_zips import saved

PLAIN = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16".split()

WRITERS: dict[str, Callable[..., bytes]] = {"zip": saved, "legacy": legacy}


def random(dtype: str, *shape: int) -> NDArray[np.generic]:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 256, nbytes, np.uint8)
    array: NDArray[np.generic] = data.view(dtype).reshape(shape)
    return array


def checkpoint(dtype: str) -> dict[str, object]:
    w = random(dtype, 3, 4)
    return {
        "w": w,
        "fortran": np.asfortranarray(random(dtype, 5, 2, 3)),
        "columns": w[:, ::2],
        "reversed": w[::-1],
        "scalar": random(dtype).reshape(()) if dtype != "?" else np.array(True),
        "empty": random(dtype, 0, 3),
        "large": random(dtype, 100, 101),
        "one": torch.ones(2),
        "nested": [{"w": w}, (w.copy(),)],
        "epoch": 3,
    }


def same(found: torch.Tensor, expected: NDArray[np.generic]) -> None:
    assert found.shape == expected.shape
    assert found.numpy().dtype == expected.dtype
    assert found.numpy().tobytes() == expected.tobytes()  # NaNs too


EVERY = [(dtype, protocol) for dtype in PLAIN for protocol in (2, 5)]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("dtype", "protocol"), [*EVERY, ("f4", 3), ("f4", 4)])
def test_arrays_of_plain_dtypes_are_tensors(tmp_path: Path, dtype: str, writer: str, protocol: int) -> None:
    data = WRITERS[writer](checkpoint(dtype), pickle_protocol=protocol)
    whole = torch.load(io.BytesIO(data), weights_only=False)
    expected = {name: whole[name] for name in ("w", "fortran", "columns", "reversed", "scalar", "empty", "large")}
    expected |= {"nested.0.w": whole["nested"][0]["w"], "nested.1.0": whole["nested"][1][0]}
    (tmp_path / "file").write_bytes(data)
    packs = []
    for source in (tmp_path / "file", io.BytesIO(data)):
        found = converted(source, tmp_path / "pack", key=".")
        packs.append((tmp_path / "pack").read_bytes())
        with io.BytesIO() as stream:
            again = source if isinstance(source, Path) else io.BytesIO(data)
            stream_pack.convert(again, stream, key=".", spool_dir=tmp_path)
            packs.append(stream.getvalue())
    assert len(set(packs)) == 1
    assert found.keys() == expected.keys() | {"one"}
    for name, array in expected.items():
        same(found[name], array)
    assert torch.equal(found["one"], torch.ones(2))


def test_the_names_of_numpy_1_are_known(tmp_path: Path) -> None:
    for protocol, longer, shorter in (
        (2, b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"),
        (5, b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric"),
    ):
        data = saved({"w": random("f4", 2, 3)}, pickle_protocol=protocol)
        target = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w") as copy:
            for entry in source.infolist():
                record = source.read(entry)
                if entry.filename.endswith("data.pkl"):
                    assert record.count(longer) == 1
                    record = record.replace(longer, shorter)
                    if protocol == 5:  # the frame is a byte shorter
                        at = record.index(b"\x95") + 1
                        frame = int.from_bytes(record[at : at + 8], "little") - 1
                        record = record[:at] + frame.to_bytes(8, "little") + record[at + 8 :]
                copy.writestr(entry.filename, record)
        same(converted(io.BytesIO(target.getvalue()), tmp_path / "pack")["w"], random("f4", 2, 3))


def test_one_array_under_two_names_is_stored_once(tmp_path: Path) -> None:
    w = random("f4", 1000, 7)
    for data in (saved({"a": w, "b": w, "c": w.copy()}), legacy({"a": w, "b": w, "c": w.copy()})):
        report = stream_pack.convert(io.BytesIO(data), tmp_path / "pack")
        assert (report.tensors, report.tied, report.source_nbytes) == (3, 1, 2 * w.nbytes)
        assert report.remarks == report.warnings == ()


def test_arrays_are_cast_selected_and_listed_as_tensors_are(tmp_path: Path) -> None:
    w = np.linspace(0, 1, 6, dtype=np.float64).reshape(2, 3)
    data = saved({"model": {"w": w, "n": np.arange(3)}, "opt": {"m": np.ones(2, np.float32)}})
    rows = {row.path: (row.tensors, row.nbytes, row.chosen) for row in stream_pack.list_keys(io.BytesIO(data))}
    assert rows == {(): (3, 48 + 24 + 8, False), ("model",): (2, 72, True), ("opt",): (1, 8, False)}
    found = converted(io.BytesIO(data), tmp_path / "pack", exclude="n", dtype="bf16")
    assert found.keys() == {"w"}
    assert torch.equal(found["w"], torch.from_numpy(w).to(torch.bfloat16))
    with pytest.raises(SourceError, match="single tensor"):
        converted(io.BytesIO(saved(w)), tmp_path / "pack")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_a_big_endian_array_is_refused_by_name_and_advice(tmp_path: Path, writer: str, dtype: str) -> None:
    data = WRITERS[writer]({"good": torch.ones(1), "w": np.ones(3, dtype)})
    with pytest.raises(SourceError, match=r"'w' is a NumPy array whose bytes are big-endian.*newbyteorder"):
        converted(io.BytesIO(data), tmp_path / "pack")
    assert converted(io.BytesIO(data), tmp_path / "pack", exclude="w").keys() == {"good"}


CODE: dict[str, object] = {
    "objects": np.array([{}, None], object),
    "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a"]),
    "a structure": np.zeros(2, [("a", "<f4"), ("b", "<i4")]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "long doubles": np.ones(2, np.longdouble),
    "a scalar": np.float64(2),
    "a matrix": np.ones((2, 2)).view(np.matrix),
    "masked": np.ma.masked_array(np.ones(2), [True, False]),
    "a record": np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "a dtype": np.dtype("<f4"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", CODE)
def test_what_only_code_could_rebuild_stays_unknown(tmp_path: Path, kind: str, writer: str) -> None:
    for protocol in (2, 4, 5):
        data = WRITERS[writer]({"w": torch.ones(1), "x": CODE[kind]}, pickle_protocol=protocol)
        with pytest.raises(SourceError, match=r"names 'numpy.*\(under 'x'\).*--ignore-unknown"):
            converted(io.BytesIO(data), tmp_path / "pack")
        assert converted(io.BytesIO(data), tmp_path / "pack", ignore_unknown=True).keys() == {"w"}


def test_bytes_that_are_not_there_are_no_array(tmp_path: Path) -> None:
    data = legacy({"w": random("f4", 3, 1, 7), "good": torch.ones(1)}, pickle_protocol=3)
    shape = b"K\x03K\x01K\x07\x87"
    assert data.count(shape) == 1
    damaged = data.replace(shape, b"K\x03K\x01K\x08\x87")
    with pytest.raises(SourceError, match="'w' is a NumPy array of 96 bytes, of which 84 are there"):
        converted(io.BytesIO(damaged), tmp_path / "pack")
    assert converted(io.BytesIO(damaged), tmp_path / "pack", include="good").keys() == {"good"}


def test_an_array_beside_a_big_endian_checkpoints_tensors_keeps_its_order(tmp_path: Path) -> None:
    array = random("f4", 2, 2)
    target = io.BytesIO()
    data = saved({"t": torch.ones(2), "a": array})
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            record = source.read(entry)
            if entry.filename.endswith("/byteorder"):
                record = b"big"
            elif "/data/" in entry.filename:
                record = np.frombuffer(record, "<u4").byteswap().tobytes()
            copy.writestr(entry.filename, record)
    found = converted(io.BytesIO(target.getvalue()), tmp_path / "pack")
    assert found["t"].tolist() == [1, 1]
    same(found["a"], array)
