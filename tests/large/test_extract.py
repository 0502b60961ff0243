"""Extracting takes a few chunks of memory, whatever the model, and files beyond 4 GiB are read by their libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch

import stream_pack
from tests.support.memory import measure, needs_proc
from tests.support.sparse_source import SparseSource

GIB = 1 << 30
LIMIT = 80 << 20
ROWS = GIB // 4  # of four int32

pytestmark = needs_proc


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a sparse pack of 4.5 GiB in tensors that end in their own numbers; one of them is small."""
    folder = tmp_path_factory.mktemp("extract")
    tensors = {"w0": ("int32", (ROWS, 4)), "w1": ("int32", (ROWS // 8, 4)), "small": ("int32", (2,))}
    stream_pack.convert(SparseSource(tensors), folder / "pack")
    yield folder
    for path in folder.iterdir():
        path.unlink()


def extract(*arguments: object, **files: object) -> int:
    argv = [sys.executable, "-m", "stream_pack", "extract", "--quiet", *map(str, arguments)]
    return measure(argv, **files).peak_anonymous_nbytes  # type: ignore[arg-type]


def ends(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten()[-2:].tolist()


def test_torch_maps_an_archive_with_a_record_of_4_gib_and_records_behind_it(folder: Path) -> None:
    target = folder / "o.pt"
    assert extract(folder / "pack", "-o", target) < LIMIT
    found = torch.load(target, weights_only=True, mmap=True)
    assert [ends(found[name]) for name in ("w0", "w1", "small")] == [[0, 0], [1, 0], [2, 0]]
    assert found["w0"].shape == (ROWS, 4)
    with open(target, "rb") as file:  # as our own reader of pipes sees it, with every CRC-32
        argv = [sys.executable, "-m", "stream_pack", "convert", "--json", "-", str(folder / "again")]
        done = subprocess.run(argv, stdin=file, capture_output=True, check=True)
    assert b"CRC-32 of every record verified" in done.stdout
    assert (folder / "again").stat().st_size == (folder / "pack").stat().st_size
    target.unlink()
    (folder / "again").unlink()


def test_a_pipe_to_safetensors_takes_no_more(folder: Path) -> None:
    target = folder / "o.safetensors"
    with open(folder / "pack", "rb") as pack, open(target, "wb") as out:
        with subprocess.Popen(["cat"], stdin=pack, stdout=subprocess.PIPE) as reader:
            assert extract("-", "--to", "safetensors", "-o", "-", stdin=reader.stdout, stdout=out) < LIMIT
        assert reader.returncode == 0
    with safetensors.safe_open(target, "pt") as file:
        for number, (name, rows) in enumerate((("w0", ROWS), ("w1", ROWS // 8))):
            part = file.get_slice(name)
            assert part.get_shape() == [rows, 4]
            assert part[rows - 1 :].flatten().tolist()[-2:] == [number, 0]
    target.unlink()


def test_a_record_of_numpys_beyond_4_gib_is_found_in_the_directory(folder: Path) -> None:
    import numpy as np

    target = folder / "o.npz"
    assert extract(folder / "pack", "-o", target) < LIMIT
    assert os.path.getsize(target) > 4 * GIB
    with np.load(target) as found:
        assert found["small"].tolist() == [2, 0]
    target.unlink()
