"""Converting a file onto itself: under its own name, through other names, and through a stdin that it stands behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import stream_pack
from tests.vectors import minimal_reader

WEIGHTS = {
    # More than is held back before the first write, so that the source is still being read when the output grows.
    "big": torch.arange(3 << 20, dtype=torch.int32).reshape(3, -1),
    "small": torch.arange(7, dtype=torch.int16),
    "tail": torch.arange(600_000, dtype=torch.int64),
}
WANTED = {name: tensor.numpy().tobytes() for name, tensor in WEIGHTS.items()}


def save_torch(path: Path) -> None:
    torch.save(WEIGHTS, path)


def save_safetensors(path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, path)


def save_pack(path: Path) -> None:
    # Other alignments and blocks than the default: converting it moves every tensor.
    alignment = stream_pack.Alignment(small=16, large=16, large_nbytes=16)
    stream_pack.save_file(WEIGHTS, path, alignment=alignment, block_nbytes=4096)


KINDS = [save_torch, save_safetensors, save_pack]


@pytest.fixture(params=KINDS, ids=lambda save: save.__name__.removeprefix("save_"))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint, alone in its folder."""
    folder = tmp_path / "models"
    folder.mkdir()
    save: Callable[[Path], None] = request.param
    save(folder / "model")
    return folder / "model"


def assert_packed(path: Path) -> None:
    pack = minimal_reader.read(path.read_bytes())
    assert {name: tensor.data for name, tensor in pack.tensors.items()} == WANTED
    assert pack.tensors["tail"].file_offset % 16384 == 0
    with stream_pack.open(path) as opened:
        assert opened.verify(jobs=1).ok


@pytest.mark.parametrize("jobs", [1, 4])
def test_under_its_own_name(model: Path, jobs: int) -> None:
    stream_pack.convert(model, model, jobs=jobs)
    assert_packed(model)
    assert os.listdir(model.parent) == ["model"]


def test_to_another_name_of_the_same_file_which_the_first_name_does_not_notice(model: Path) -> None:
    before = model.read_bytes()
    other = model.parent / "other"
    os.link(model, other)
    stream_pack.convert(model, other)
    assert_packed(other)
    assert model.read_bytes() == before
    assert model.stat().st_ino != other.stat().st_ino


def test_from_another_name_of_the_same_file_which_keeps_the_old_bytes(model: Path) -> None:
    before = model.read_bytes()
    other = model.parent / "other"
    os.link(model, other)
    stream_pack.convert(other, model)
    assert_packed(model)
    assert other.read_bytes() == before


def test_to_a_symlink_that_leads_to_it_and_stays_one(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("models/model")
    stream_pack.convert(model, link)
    assert os.readlink(link) == "models/model"
    assert not model.is_symlink()
    assert_packed(model)
    assert os.listdir(model.parent) == ["model"]


def test_from_a_symlink_that_leads_to_it_and_stays_one(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(model)
    stream_pack.convert(link, model)
    assert link.is_symlink()
    assert_packed(model)


def test_from_a_descriptor_that_still_reads_the_old_bytes_afterwards(model: Path) -> None:
    before = model.read_bytes()
    with model.open("rb") as file:
        stream_pack.convert(file.fileno(), model)
        assert file.read() == before
    assert_packed(model)


def test_a_conversion_that_fails_leaves_it_as_it_was(model: Path) -> None:
    damaged = bytearray(model.read_bytes())
    del damaged[-100:]
    model.write_bytes(damaged)
    with pytest.raises(stream_pack.StreamPackError):
        stream_pack.convert(model, model)
    assert model.read_bytes() == damaged
    assert os.listdir(model.parent) == ["model"]


def test_tensors_of_an_open_pack_can_be_saved_over_it_while_they_live(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_pack(path)
    loaded = stream_pack.load_file(path)
    loaded["small"].add_(1)
    stream_pack.save_file(loaded, path)
    assert torch.equal(loaded["big"], WEIGHTS["big"])
    with stream_pack.open(path) as pack:
        assert torch.equal(pack["small"].torch(), WEIGHTS["small"] + 1)
        assert torch.equal(pack["tail"].torch(), WEIGHTS["tail"])
