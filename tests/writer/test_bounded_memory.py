"""Converting takes less memory than the model has: a small model of what ``tests/large`` measures on gibibytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import stream_pack
from tests.support.memory import measure, needs_proc

MIB = 1 << 20
LIMIT = 80 * MIB
SIDE = 6400  # 156 MiB as float32

pytestmark = needs_proc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A square matrix, transposed, and its first half: the transposed one cannot be copied as it is."""
    path = tmp_path_factory.mktemp("bounded") / "model.pt"
    numbers = torch.arange(SIDE * SIDE, dtype=torch.int32).remainder_(2048)
    w = numbers.float().reshape(SIDE, SIDE)
    torch.save({"t": w.t(), "top": w[: SIDE // 2]}, path)
    yield path
    path.unlink()


@pytest.mark.parametrize("options", [(), ("--dtype", "f16")], ids=["as it is", "cast"])
@pytest.mark.parametrize("piped", [False, True], ids=["file", "pipe"])
def test_a_model_is_never_held_whole(model: Path, piped: bool, options: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "pack"
    argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", *options]
    with subprocess.Popen(["cat", model], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        source = "-" if piped else str(model)
        peak = measure([*argv, source, str(target)], stdin=cat.stdout.fileno())
        cat.kill()
    assert peak.peak_anonymous_nbytes < LIMIT < model.stat().st_size
    row = np.arange(SIDE * SIDE - SIDE, SIDE * SIDE) % 2048  # whole numbers that float16 has
    with stream_pack.open(target) as pack:
        assert np.array_equal(pack["t"].numpy()[:, -1], row)
    target.unlink()
