"""torch.save archives, held against torch and Python's zipfile."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack.errors import UnsupportedTensorError
from stream_pack.extraction import zip_archive
from stream_pack.format.dtypes import DTYPES
from tests.extraction.test_safetensors import made
from tests.sources.byte_sources import Dribble
from tests.support.kinds import FULL, bits, equal

ALL = [
    found
    for dtype in DTYPES
    if not dtype.torch_pairs and isinstance(found := getattr(torch, dtype.torch or "", None), torch.dtype)
]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_comes_back(mmap: bool, tmp_path: Path) -> None:
    tensors = {str(dtype): made(dtype, (2, 3)) for dtype in ALL}
    tensors |= {f"empty {dtype}": made(dtype, (0, 2)) for dtype in ALL}
    stream_pack.save_file(tensors, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    found = torch.load(tmp_path / "o.pt", weights_only=True, mmap=mmap)
    assert list(found) == list(tensors)
    assert equal(found, tensors)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.values())


def test_four_bit_pairs_come_back(tmp_path: Path) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)
    stream_pack.save_file({"w": tensor}, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    found = torch.load(tmp_path / "o.pt", weights_only=True)["w"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bits(found) == bits(tensor)


@pytest.mark.parametrize("rank", range(6))
def test_any_number_of_dims_and_long_ones(rank: int, tmp_path: Path) -> None:
    shape = (300, *[1] * (rank - 1))[:rank]
    stream_pack.save_file({"w": made(torch.int16, shape), "n" * 70_000: torch.ones(1)}, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    assert equal(torch.load(tmp_path / "o.pt"), {"w": made(torch.int16, shape), "n" * 70_000: torch.ones(1)})


def test_ties_and_views_share_storages_as_before(tmp_path: Path) -> None:
    w = torch.arange(64.0)
    tensors = {"w": w, "tied": w, "square": w.view(8, 8), "tail": w[8:], "bytes": w.view(torch.uint8)}
    stream_pack.save_file({**tensors, "other": torch.ones(64)}, tmp_path / "pack", alignment=stream_pack.Alignment(16))
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    assert equal(found, {**tensors, "other": torch.ones(64)})
    found["w"][8] = -1
    assert (found["tied"][8], found["square"][1, 0], found["tail"][0]) == (-1, -1, -1)
    assert found["bytes"].view(torch.float32)[8] == -1
    assert found["other"][8] == 1


def test_the_archive_is_one_that_other_programs_read(tmp_path: Path) -> None:
    stream_pack.save_file(FULL, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    with zipfile.ZipFile(tmp_path / "o.pt") as archive, open(tmp_path / "o.pt", "rb") as file:
        assert archive.testzip() is None  # every CRC-32 is right
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name_nbytes, extra_nbytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
            assert (info.header_offset + 30 + name_nbytes + extra_nbytes) % 64 == 0
        names = archive.namelist()
    torch.save(FULL, tmp_path / "theirs.pt")
    with zipfile.ZipFile(tmp_path / "theirs.pt") as theirs:
        wanted = [name.partition("/")[2] for name in theirs.namelist()]
    wanted.remove(".data/serialization_id")  # a number that says which torch.save call it was
    ours = [name.partition("/")[2] for name in names]
    assert ours[:4] + ours[-1:] == wanted[:4] + wanted[-1:]


def test_an_empty_dict_can_be_loaded(tmp_path: Path) -> None:
    stream_pack.save_file({}, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    assert torch.load(tmp_path / "o.pt", weights_only=True) == {}


def test_more_items_than_a_batch(tmp_path: Path) -> None:
    tensors = {f"t{k}": torch.full((k % 3,), float(k)) for k in range(2001)}
    stream_pack.save_file(tensors, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    assert equal(torch.load(tmp_path / "o.pt", weights_only=True), tensors)


def test_fields_of_eight_bytes_where_four_are_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if records were long at 400 bytes: readers take the wide fields wherever they are."""
    monkeypatch.setattr(zip_archive, "WIDE_NBYTES", 400)
    tensors = {f"t{k}": torch.full((k * 50,), float(k)) for k in range(5)}
    stream_pack.save_file(tensors, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    assert equal(torch.load(tmp_path / "o.pt", weights_only=True, mmap=True), tensors)
    with zipfile.ZipFile(tmp_path / "o.pt") as archive:
        assert archive.testzip() is None
    data = (tmp_path / "o.pt").read_bytes()
    stream_pack.convert(Dribble(data, step=99), tmp_path / "again")
    assert equal(stream_pack.load_file(tmp_path / "again"), tensors)


def test_int4_has_no_place_in_torch(tmp_path: Path) -> None:
    with stream_pack.Writer(tmp_path / "pack", {"w": stream_pack.Spec("int4", (4,))}) as writer:
        writer.write("w", b"\x12\x34")
    with pytest.raises(UnsupportedTensorError, match="int4, which torch does not have: extract it --to raw"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o", to="raw")
    assert (tmp_path / "o").read_bytes() == b"\x12\x34"
