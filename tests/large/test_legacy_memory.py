"""A legacy checkpoint of 1 GiB takes a few chunks of memory, from a file and from a pipe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.memory import measure, needs_proc

MIB = 1 << 20
LIMIT = 80 * MIB

pytestmark = needs_proc


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("legacy") / "model.pt"
    tensors = {f"layers.{n}.weight": torch.full((8 * MIB,), float(n)) for n in range(32)}
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert path.stat().st_size > 1 << 30
    yield path
    path.unlink()


def convert(source: str, target: Path, stdin: int | None = None) -> int:
    command = [sys.executable, "-m", "stream_pack", "convert", "--quiet", source, str(target)]
    peak = measure(command, stdin=stdin).peak_anonymous_nbytes
    assert target.stat().st_size > 1 << 30
    target.unlink()
    return peak


def test_from_a_file(checkpoint: Path, tmp_path: Path) -> None:
    assert convert(str(checkpoint), tmp_path / "pack") < LIMIT


def test_from_a_pipe(checkpoint: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["cat", checkpoint], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        assert convert("-", tmp_path / "pack", cat.stdout.fileno()) < LIMIT
