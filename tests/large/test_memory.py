"""Converting takes a few chunks of memory, whatever the model: measured on 1 GiB, in a process of its own."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stream_pack
from tests.support.memory import anonymous_nbytes, measure, needs_proc

MIB = 1 << 20
LIMIT = 80 * MIB

pytestmark = needs_proc


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint of 1 GiB; what the tests add is removed by them."""
    folder = tmp_path_factory.mktemp("memory")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{number}.weight": torch.empty(8 * MIB, dtype=torch.int32).random_(generator=generator)
        for number in range(32)
    }
    torch.save(tensors, folder / "model.pt")
    yield folder
    for path in folder.iterdir():
        path.unlink()


def convert(*arguments: object, stdin: int | None = None) -> int:
    argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", *map(str, arguments)]
    return measure(argv, stdin=stdin).peak_anonymous_nbytes


def test_a_gibibyte_from_a_file_stays_below_80_mib(folder: Path) -> None:
    target = folder / "model.pack"
    assert convert(folder / "model.pt", target) < LIMIT
    assert target.stat().st_size > 1 << 30
    target.unlink()


def test_a_gibibyte_from_a_pipe_stays_below_80_mib(folder: Path) -> None:
    target = folder / "model.pack"
    with subprocess.Popen(["cat", folder / "model.pt"], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        assert convert("-", target, stdin=cat.stdout.fileno()) < LIMIT
    assert target.stat().st_size > 1 << 30
    target.unlink()


def test_a_pack_of_a_gibibyte_to_a_stream_stays_below_80_mib(folder: Path) -> None:
    target, copy = folder / "model.pack", folder / "copy.pack"
    convert(folder / "model.pt", target)
    argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", str(target), "-"]
    with open(copy, "wb") as out:
        assert measure(argv, stdout=out).peak_anonymous_nbytes < LIMIT
    assert filecmp.cmp(copy, target, shallow=False)
    target.unlink()
    copy.unlink()


def test_ten_thousand_tensors_stay_below_80_mib(folder: Path) -> None:
    source, target = folder / "many.pt", folder / "many.pack"
    tensors = {f"layers.{n}.weight": torch.full((25_000,), float(n)) for n in range(10_000)}
    torch.save(tensors, source)
    assert source.stat().st_size > 950 * MIB
    del tensors
    assert convert(source, target) < LIMIT
    source.unlink()
    target.unlink()


def test_ten_thousand_tensors_from_a_pipe_stay_below_80_mib(folder: Path) -> None:
    """The producer saves them straight into the pipe: no file is read again."""
    target = folder / "many.pack"
    produce = """
import sys, torch
ones = torch.ones(26_214 + 1)
torch.save({f"layers.{n}.weight": ones.mul(n) for n in range(10_240)}, sys.stdout.buffer)
"""
    with subprocess.Popen([sys.executable, "-c", produce], stdout=subprocess.PIPE) as producer:
        assert producer.stdout is not None
        assert convert("-", target, stdin=producer.stdout.fileno()) < LIMIT
        assert producer.wait() == 0
    assert target.stat().st_size > 1 << 30
    with stream_pack.open(target) as pack:
        assert len(pack) == 10_240
        assert pack["layers.10239.weight"].numpy()[[0, -1]].tolist() == [10_239, 10_239]
    target.unlink()


WRITE = """
import sys, stream_pack

def chunks(number):
    for step in range(256):
        yield bytes([number]) * (1 << 20)  # made for this one step, and dropped

specs = {f"t{number}": ("uint8", (256 << 20,)) for number in range(4)}
target = sys.argv[1] if sys.argv[1] != "-" else 1
with stream_pack.Writer(target, specs) as writer:
    for number in range(4):
        writer.write(f"t{number}", chunks(number + 1))
"""


@pytest.mark.parametrize("to", ["path", "stream"])
def test_a_gibibyte_that_a_generator_makes_is_written_in_less_than_80_mib(to: str, folder: Path) -> None:
    """ST#531, ST#447: tensors that never exist whole in memory."""
    target = folder / "written.pack"
    argv = [sys.executable, "-c", WRITE, str(target) if to == "path" else "-"]
    if to == "path":
        assert measure(argv).peak_anonymous_nbytes < LIMIT
    else:
        with open(target, "wb") as out:
            assert measure(argv, stdout=out).peak_anonymous_nbytes < LIMIT
    with stream_pack.open(target) as pack:
        for number in range(4):
            array = pack[f"t{number}"].numpy()
            assert array.nbytes == 256 * MIB
            assert array[:: 1 << 20].tolist() == [number + 1] * 256
            assert array[-1] == number + 1
    target.unlink()


MAKE = 'import sys, torch; tensors = {f"t{n}": torch.full((8 << 20,), float(n)) for n in range(32)}'
SAVE = "; import stream_pack; stream_pack.save_file(tensors, sys.argv[1])"


def test_saving_a_gibibyte_of_live_tensors_adds_less_than_32_mib(folder: Path) -> None:
    target = folder / "live.pack"
    without = measure([sys.executable, "-c", MAKE, target]).peak_anonymous_nbytes
    saving = measure([sys.executable, "-c", MAKE + SAVE, target]).peak_anonymous_nbytes
    assert saving - without < 32 * MIB
    assert without > 1 << 30
    assert target.stat().st_size > 1 << 30
    target.unlink()


def test_the_limit_can_fail() -> None:
    hungry = "b = bytearray(120 << 20); b[::4096] = b'x' * len(b[::4096])"
    assert measure([sys.executable, "-c", hungry]).peak_anonymous_nbytes > LIMIT
    assert anonymous_nbytes() > 0
