"""A sector that cannot be read, and a file that is cut meanwhile, are errors that name the bytes, never a signal."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack import ReadError, TruncatedError
from tests.support.bad_disk import environment, needs_compiler
from tests.support.packs import BLOCK_NBYTES, Places, pack_bytes, places, tensors

VERIFY = [sys.executable, "-m", "stream_pack", "verify"]
LAZY = """
import sys, stream_pack
with stream_pack.open(sys.argv[1], verify="lazy") as pack:
    for name in pack:
        try:
            pack[name].numpy() if pack[name].dtype != "bfloat16" else pack[name].torch()
        except OSError as error:
            print(name, type(error).__name__, error.errno, error.file_begin, error.file_end, *error.tensors)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


@pytest.fixture
def data(path: Path) -> bytes:
    return pack_bytes(path)


def verify(path: Path, begin: int, end: int, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, on a disk on which these bytes are bad."""
    return subprocess.run(
        [*VERIFY, *options, path], env=environment(path, begin, end), capture_output=True, text=True, check=False
    )


def offset_of(path: Path, name: str) -> int:
    with stream_pack.open(path) as pack:
        return pack[name].file_offset


@needs_compiler
def test_a_bad_sector_is_an_io_error_that_names_tensor_and_bytes(path: Path, data: bytes) -> None:
    begin = offset_of(path, "embed") + BLOCK_NBYTES
    done = verify(path, begin + 100, begin + 200)
    assert done.returncode == 4
    assert done.stderr == ""
    block = f"block 1 of buffer 0 (bytes {begin} to {begin + BLOCK_NBYTES} of the pack)"
    assert done.stdout.splitlines() == [
        f"{path}: tensor 'embed', 'head', 'rows': {block} cannot be read: Input/output error",
        f"{path}: not all of it could be verified because of this damage",
    ]


@needs_compiler
def test_what_can_be_read_is_verified_all_the_same(path: Path, data: bytes) -> None:
    begin, step = offset_of(path, "embed"), offset_of(path, "step")
    path.write_bytes(data[:step] + b"\xff" + data[step + 1 :])
    done = verify(path, begin, begin + 1, "--json", "--jobs", "1")
    assert done.returncode == 1  # of the damage there is no doubt
    report = json.loads(done.stdout)
    assert [(damage["tensors"], damage["unreadable"]) for damage in report["damages"]] == [
        (["embed", "head"], True),
        (["step"], False),
    ]
    assert not report["complete"]
    assert (report["blocks"], report["nbytes"]) == (5, 12313 - BLOCK_NBYTES)


def parts(at: Places) -> Iterator[tuple[str, int, int]]:
    """What is in a pack beside blocks, with an exit code for when it cannot be read."""
    yield "header", 0, 4
    yield "graph", 100, 4
    yield "index", at.index + 8, 4
    yield "head padding", at.index_end, 4
    yield "locator", at.locator, 4
    yield "region padding", at.region_end - 1, 4
    yield "checksums", at.region_end, 4
    yield "footer", at.footer, 4


@needs_compiler
def test_every_part_of_a_pack_may_be_in_a_bad_sector(path: Path, data: bytes) -> None:
    for part, place, code in parts(places(data)):
        done = verify(path, place, place + 1)
        assert done.returncode == code, part
        told = done.stdout + done.stderr
        assert told.count("cannot be read: Input/output error") >= 1, part
        assert str(path) in told.splitlines()[0]


@needs_compiler
def test_a_lazy_read_of_a_bad_sector_is_an_error_and_other_tensors_are_had(path: Path, data: bytes) -> None:
    begin = offset_of(path, "step")
    done = subprocess.run(
        [sys.executable, "-c", LAZY, path],
        env=environment(path, begin, begin + 8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, f"step ReadError 5 {begin} {begin + 8} step\n")


@needs_compiler
def test_an_inspected_head_in_a_bad_sector_is_an_io_error(path: Path, data: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stream_pack", "inspect", path],
        env=environment(path, places(data).index, places(data).index + 1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr.startswith(f"stream-pack: error: {path}: bytes ")
    assert done.stderr.endswith(" cannot be read: Input/output error\n")


def test_a_pack_that_was_cut_since_it_was_opened_is_damaged(path: Path, data: bytes) -> None:
    at = places(data)
    for nbytes in (len(data) - 1, at.region + 5000, at.region, 100, 0):
        path.write_bytes(data)
        with stream_pack.open(path) as pack:
            os.truncate(path, nbytes)
            for jobs in (1, 2):
                report = pack.verify(jobs=jobs)
                (damage,) = report.damages
                assert (damage.part, damage.file_end) == ("length", len(data))
                assert "was truncated while it was open" in damage.message
                assert f", found {nbytes};" in damage.message
                assert not report.complete
                with pytest.raises(TruncatedError):
                    report.raise_if_damaged()


def test_a_pack_inside_another_file_may_be_cut_while_it_is_open(path: Path, data: bytes) -> None:
    path.write_bytes(b"\xff" * 100 + data + b"after it")
    with stream_pack.open(path, offset=100) as pack:
        os.truncate(path, 100 + len(data))  # what followed is not the pack's
        assert pack.verify().ok
        assert torch.equal(pack["step"].torch(), tensors()["step"])
        os.truncate(path, 100 + len(data) - 1)
        assert [damage.part for damage in pack.verify().damages] == ["length"]


def test_a_lazy_read_from_a_file_that_was_cut_is_an_error(path: Path, data: bytes) -> None:
    with stream_pack.open(path, verify="lazy") as pack:
        os.truncate(path, places(data).region)
        with pytest.raises(TruncatedError, match=f"{path}: the file was truncated while it was open"):
            pack["step"].numpy()


def test_a_file_that_is_cut_in_the_middle_of_a_verification_is_damaged(path: Path) -> None:
    data = pack_bytes(path, {"w": torch.zeros(3 * 1024 * BLOCK_NBYTES, dtype=torch.uint8)})

    def cut(done: int, total: int) -> None:
        os.truncate(path, len(data) - 2 * 1024 * BLOCK_NBYTES)

    report = stream_pack.verify(path, jobs=1, progress=cut)
    assert [damage.part for damage in report.damages] == ["length"]
    assert not report.complete


CUTTER = """
import os, random, sys, time
path, seed = sys.argv[1], int(sys.argv[2])
sys.stdin.readline()
time.sleep(random.Random(seed).random() * float(sys.argv[3]))
os.truncate(path, random.Random(seed + 1).randrange(os.stat(path).st_size))
"""


def cut_while_it_is_verified(path: Path, data: bytes, seed: int) -> None:
    path.write_bytes(data)
    cutter = subprocess.Popen(
        [sys.executable, "-S", "-c", CUTTER, path, str(seed), "0.4"], stdin=subprocess.PIPE, text=True
    )
    verifier = subprocess.Popen(
        [*VERIFY, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert cutter.stdin is not None
    cutter.stdin.write("\n")
    cutter.stdin.close()
    out, err = verifier.communicate()
    cutter.wait()
    told = out + err
    # Whole when it was looked at; or cut inside the head, the magic included.
    assert verifier.returncode in (0, 1, 3), told
    assert told.splitlines()[0].removeprefix("stream-pack: error: ").startswith(str(path)), told
    if verifier.returncode == 1:
        assert "truncated" in told, told
    if verifier.returncode == 3:
        assert "not a pack" in told, told


@needs_compiler
@pytest.mark.parametrize("tries", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_cuts_and_bad_sectors_anywhere_never_end_in_a_signal(tries: int, path: Path) -> None:
    content = {f"t{number}": torch.full((300_000,), number, dtype=torch.int64) for number in range(10)}
    data = pack_bytes(path, content)
    at = places(data)
    generator = random.Random(tries)
    for seed in range(tries):
        cut_while_it_is_verified(path, data, seed)
        path.write_bytes(data)
        place = generator.randrange(len(data))
        done = verify(path, place, place + generator.choice([1, 4096, 100_000]))
        assert done.returncode == 4, (place, done)
        told = done.stdout + done.stderr
        assert "cannot be read: Input/output error" in told
        if at.region <= place < at.region + 8 * 300_000:
            assert "tensor 't0'" in told


def test_what_cannot_be_read_is_an_os_error_that_travels_between_processes() -> None:
    error = ReadError("it", errno=5, strerror="Input/output error", filename="f", file_begin=1, file_end=2)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ReadError)
    assert issubclass(ReadError, OSError)
    assert (str(again), again.errno, again.strerror, again.filename) == ("it", 5, "Input/output error", "f")
    assert (again.file_begin, again.file_end) == (1, 2)
