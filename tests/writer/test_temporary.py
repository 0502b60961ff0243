"""What a killed writer leaves is removed by the next one beside it; what a living one writes is not."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stream_pack.writer.sink import FileSink
from stream_pack.writer.temporary import create_temporary, sweep

WRITES_AND_WAITS = """
import sys
from stream_pack.writer.sink import FileSink
sink = FileSink(sys.argv[1])
sink.begin(100, reserve=True)
sink.put(0, b"unfinished")
sink.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path) -> None:
    with FileSink(path) as sink:
        sink.begin(3, reserve=True)
        sink.put(0, b"new")
        sink.commit()


def writer_of(path: Path) -> subprocess.Popen[str]:
    """A process that has begun to write ``path``, and does not end before its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES_AND_WAITS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    with writer_of(tmp_path / "killed") as killed, writer_of(tmp_path / "alive") as alive:
        assert len(names(tmp_path)) == 2
        killed.kill()
        killed.wait()
        assert len(names(tmp_path)) == 2
        write(tmp_path / "done")
        (left, done) = names(tmp_path)
        assert (left[:13], done) == (".stream_pack-", "done")
        assert (tmp_path / left).read_bytes()[:10] == b"unfinished"
        alive.kill()
    write(tmp_path / "done")
    assert names(tmp_path) == ["done"]


def test_two_writers_of_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    with FileSink(tmp_path / "first") as first:
        first.begin(1, reserve=True)
        first.put(0, b"1")
        write(tmp_path / "second")
        first.commit()
    assert (tmp_path / "first").read_bytes() == b"1"
    assert names(tmp_path) == ["first", "second"]


def test_files_of_other_machines_and_of_other_programs_stay(tmp_path: Path) -> None:
    """A lock on a network file system may be known to one machine alone."""
    file, path = create_temporary(str(tmp_path))
    os.close(file)
    machine, _, rest = Path(path).name.removeprefix(".stream_pack-").partition("-")
    other = f"{int(machine, 16) ^ 1:08x}"
    kept = [f".stream_pack-{other}-{rest}", f".stream_pack-{machine}-{rest}.pack", "x.tmp"]
    for name in kept:
        (tmp_path / name).touch()
    sweep(str(tmp_path))
    assert names(tmp_path) == sorted(kept)


def test_what_only_looks_like_an_unfinished_file_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    file, path = create_temporary(str(tmp_path))
    os.close(file)
    os.unlink(path)
    precious = tmp_path / "precious"
    precious.touch()
    os.symlink(precious, path.replace(".tmp", "1.tmp"))
    os.mkfifo(path.replace(".tmp", "2.tmp"))
    os.mkdir(path.replace(".tmp", "3.tmp"))
    before = names(tmp_path)
    sweep(str(tmp_path))
    assert names(tmp_path) == before


def test_a_file_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    swept: list[int] = []

    def late(file: int, how: int) -> None:
        if not swept:
            swept.append(file)
            sweep(str(tmp_path))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write(tmp_path / "target")
    assert swept
    assert names(tmp_path) == ["target"]


def test_without_locks_files_are_written_and_never_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    file, path = create_temporary(str(tmp_path))
    os.close(file)
    write(tmp_path / "target")
    assert names(tmp_path) == [Path(path).name, "target"]


def test_a_folder_that_cannot_be_listed_is_no_obstacle(tmp_path: Path) -> None:
    sweep(str(tmp_path / "missing"))  # raises nothing
    assert names(tmp_path) == []
