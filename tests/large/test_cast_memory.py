"""Casting, transposing and --max-memory take the memory that they say, measured in a process of its own."""

from __future__ import annotations

import json
import re
import resource
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

pytestmark = needs_proc

SIDE = 16384
VALUES = np.arange(MIB, dtype="<f4") / 1024  # every one of them; repeated, 4 MiB at a time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1 GiB: one square matrix, as it is and transposed, and its first half."""
    path = tmp_path_factory.mktemp("cast") / "model.pt"
    w = torch.from_numpy(np.tile(VALUES, 256)).reshape(SIDE, SIDE)
    torch.save({"t": w.t(), "top": w[: SIDE // 2]}, path)
    yield path
    path.unlink()


@pytest.fixture
def target(model: Path) -> Iterator[Path]:
    path = model.with_suffix(".pack")
    yield path
    path.unlink()


def convert(*arguments: object, piped: Path | None = None) -> int:
    """The peak of anonymous memory; with ``piped`` that file comes through a pipe."""
    argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", *map(str, arguments)]
    if piped is None:
        return measure(argv).peak_anonymous_nbytes
    with subprocess.Popen(["cat", piped], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        return measure(argv, stdin=cat.stdout.fileno()).peak_anonymous_nbytes


def assert_cast(target: Path) -> None:
    """Rows of both tensors are those of the matrix, in half precision."""
    matrix = np.tile(VALUES, 256).reshape(SIDE, SIDE)
    with stream_pack.open(target) as pack:
        for row in (0, 1, 5000, SIDE // 2 - 1):
            assert np.array_equal(pack["top"].numpy()[row], matrix[row].astype("<f2"))
            assert np.array_equal(pack["t"].numpy()[row], matrix[:, row].astype("<f2"))


def test_casting_and_transposing_a_gibibyte_from_a_file_stays_below_80_mib(model: Path, target: Path) -> None:
    assert convert(model, target, "--jobs", 4, "--dtype", "f16") < LIMIT
    assert_cast(target)


def test_casting_and_transposing_a_gibibyte_from_a_pipe_stays_below_80_mib(model: Path, target: Path) -> None:
    assert convert("-", target, "--dtype", "bf16", piped=model) < LIMIT


def test_lc7075_cast_transpose_and_split_of_a_gibibyte_take_less_than_they_are_allowed(
    model: Path, target: Path
) -> None:
    allowed = 200 * MIB
    peak = convert(model, target, "--dtype", "f16", "--max-memory", allowed)
    assert LIMIT < peak < allowed  # it makes use of what it may have
    assert_cast(target)


@pytest.mark.parametrize("piped", [False, True])
def test_the_least_memory_that_a_refusal_names_is_enough(model: Path, target: Path, piped: bool) -> None:
    source = "-" if piped else str(model)
    argv = [sys.executable, "-m", "stream_pack", "convert", "--max-memory", "1", str(source), str(target)]
    with open(model, "rb") as file:
        refused = subprocess.run(argv, stdin=file, capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    named = re.search(r"at least (\d+) bytes", refused.stderr)
    assert named is not None
    # Two runs of one interpreter differ by some pages.
    allowed = int(named[1]) + MIB
    assert allowed < 40 * MIB
    options = ("--dtype", "f16", "--max-memory", allowed)
    assert convert(source, target, *options, piped=model if piped else None) < allowed


def test_et3850_widening_works_where_a_quarter_of_the_model_is_all_there_is(tmp_path: Path) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "model.pack"
    nbytes = 768 * MIB
    header = b'{"w":{"dtype":"BF16","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes // 2, nbytes)
    with open(source, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)  # a hole

    def limit_address_space() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (nbytes // 4, nbytes // 4))

    argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", "--dtype", "f32", str(source), str(target)]
    # Of NumPy's linear algebra, which nobody calls here, every thread reserves address space.
    subprocess.run(argv, env={"OPENBLAS_NUM_THREADS": "1"}, preexec_fn=limit_address_space, check=True)
    assert target.stat().st_size > 2 * nbytes
    target.unlink()
    source.unlink()


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16", "--order", "name")])
def test_ten_thousand_tensors_take_no_more_than_was_foretold_or_allowed(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    source, target = tmp_path / "model.pt", tmp_path / "model.pack"
    torch.save({f"layers.{n}.weight": torch.full((25,), float(n)) for n in range(10_000)}, source)
    argv = [sys.executable, "-m", "stream_pack", "convert", "--dry-run", "--json"]
    for allowed in ((), ("--max-memory", "60M")):
        foretold = json.loads(measure([*argv, str(source), str(target), *options, *allowed]).stdout)[
            "peak_memory_nbytes"
        ]
        assert convert(source, target, *options, *allowed) < foretold
    assert foretold <= 60 * MIB
