"""The instruments themselves: each is shown something whose measure is known."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.memory import anonymous_nbytes, measure, needs_proc, peak_anonymous_nbytes
from tests.support.smaps import mapped_file

pytestmark = needs_proc
MIB = 1 << 20


def python(*statements: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(statements)]


@pytest.fixture
def late_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The peak of statements, sampled at the start and again after the last one, whatever else the machine does."""

    def measured(*statements: str) -> int:
        done = tmp_path / "done"
        reading, writing = os.pipe()
        sleep = time.sleep
        pauses = 0

        def pause(seconds: float) -> None:
            nonlocal pauses
            pauses += 1
            for _ in range(60_000):  # a program that died makes no file
                if done.exists():
                    break
                sleep(seconds)
            if pauses == 2:
                os.close(writing)  # now it may end

        monkeypatch.setattr(time, "sleep", pause)
        last = f"open({str(done)!r}, 'x').close(); import sys; sys.stdin.read()"
        try:
            return peak_anonymous_nbytes(python(*statements, last), stdin=reading)
        finally:
            os.close(reading)

    return measured


def test_memory_that_was_given_back_before_anybody_looked_counts_in_the_peak(late_peak: Callable[..., int]) -> None:
    idle = peak_anonymous_nbytes(python("pass"))
    assert idle < 32 * MIB
    peak = late_peak(f"b = bytearray({64 * MIB})", "del b")
    assert 60 * MIB < peak - idle < 72 * MIB


def test_memory_that_was_only_reserved_is_not_counted() -> None:
    idle = peak_anonymous_nbytes(python("import mmap"))
    peak = peak_anonymous_nbytes(python("import mmap", f"m = mmap.mmap(-1, {64 * MIB})"))
    assert peak < idle + 8 * MIB


def test_pages_of_a_mapped_file_are_not_counted(tmp_path: Path, late_peak: Callable[..., int]) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(b"\1" * (64 * MIB))
    idle = peak_anonymous_nbytes(python("import mmap"))
    peak = late_peak(
        "import mmap",
        f"with open({str(path)!r}, 'rb') as f: m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)",
        "assert m.find(b'x') == -1",
    )
    assert peak < idle + 8 * MIB


def test_the_memory_of_the_parent_is_not_counted() -> None:
    ballast = bytearray(b"x") * (128 * MIB)
    assert anonymous_nbytes() > 128 * MIB
    assert peak_anonymous_nbytes(python("pass")) < 32 * MIB
    assert len(ballast) == 128 * MIB


def test_input_and_output_of_the_measured_program_are_passed_on() -> None:
    with subprocess.Popen(python("print('through the pipe')"), stdout=subprocess.PIPE) as producer:
        measured = measure(python("import sys", "print(sys.stdin.read().upper(), end='')"), stdin=producer.stdout)
    assert measured.stdout == b"THROUGH THE PIPE\n"


def test_a_program_that_fails_fails_the_measurement_with_its_own_words() -> None:
    with pytest.raises(AssertionError, match="no such luck"):
        measure(python("raise SystemExit('no such luck')"))


def test_a_shared_read_only_mapping_has_no_anonymous_page(tmp_path: Path) -> None:
    path = tmp_path / "with space"
    path.write_bytes(b"\1" * (4 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert mapping.find(b"x") == -1
        entry = mapped_file(path)
    assert entry.permissions == ("r--s",)
    assert (entry.nbytes, entry.resident) == (4 * MIB, 4 * MIB)
    assert entry.anonymous == 0
    assert mapped_file(path).permissions == ()


def test_a_private_mapping_has_one_anonymous_page_for_each_page_written(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_bytes(b"\1" * (4 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        assert mapped_file(path).anonymous == 0
        mapping[0] = mapping[3 * MIB] = 2
        entry = mapped_file(path)
    assert entry.permissions == ("rw-p",)
    assert entry.anonymous == 2 * mmap.PAGESIZE
