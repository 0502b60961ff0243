"""What a killed writer leaves is removed by the next one beside it; what a living one writes is not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

import stream_pack
from stream_pack.writer import temporary
from stream_pack.writer.parallel import ParallelWriter
from stream_pack.writer.sink import FileSink
from stream_pack.writer.temporary import LEASE_SECONDS, Temporary

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


HOUR_NS = 3600 * 10**9


def left_over(target: Path, *, machine: int = 1, age_ns: int = 0) -> str:
    """A file as a writer of ``target`` on another machine leaves it; returns its name."""
    unfinished = Temporary(str(target.parent), target.name, private=False)
    unfinished.discard()
    here, _, rest = Path(unfinished.path).name.removeprefix(".stream_pack-").partition("-")
    path = target.parent / f".stream_pack-{int(here, 16) ^ machine:08x}-{rest}"
    path.write_bytes(b"unfinished")
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now, now - age_ns))
    return path.name


def remarks_of_writing(path: Path) -> str:
    return " ".join(stream_pack.save_file({"w": np.ones(3)}, path).remarks)


def test_of_another_machine_the_next_writer_of_the_target_removes_what_has_lost_its_lease(tmp_path: Path) -> None:
    left_over(tmp_path / "target", age_ns=HOUR_NS)
    alive = left_over(tmp_path / "target")
    assert remarks_of_writing(tmp_path / "target") == ""
    assert names(tmp_path) == [alive, "target"]


def test_what_a_writer_of_another_target_has_left_is_reported(tmp_path: Path) -> None:
    dead = left_over(tmp_path / "other", age_ns=HOUR_NS)
    alive = left_over(tmp_path / "other")
    remark = remarks_of_writing(tmp_path / "target")
    assert f"{str(tmp_path)!r} holds unfinished files whose writers seem to be gone: {dead!r}; delete them" in remark
    assert names(tmp_path) == sorted([dead, alive, "target"])
    remarks_of_writing(tmp_path / "other")
    assert names(tmp_path) == sorted([alive, "other", "target"])


def test_on_this_machine_a_free_lock_is_enough_whatever_the_target_and_the_time(tmp_path: Path) -> None:
    left_over(tmp_path / "target", machine=0)
    left_over(tmp_path / "other", machine=0)
    assert remarks_of_writing(tmp_path / "target") == ""
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("machine", [0, 1])
def test_a_file_that_is_locked_has_a_writer_however_old_it_is(machine: int, tmp_path: Path) -> None:
    name = left_over(tmp_path / "target", machine=machine, age_ns=HOUR_NS)
    with open(tmp_path / name, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remarks_of_writing(tmp_path / "target") == ""
        assert names(tmp_path) == [name, "target"]


def test_files_without_a_target_in_their_names_are_removed_on_their_host_and_reported_on_others(tmp_path: Path) -> None:
    host = crc32(os.uname().nodename.encode())
    for number, age in ((host, 0), (host ^ 1, HOUR_NS), (host ^ 2, 0)):
        path = tmp_path / f".stream_pack-{number:08x}-0123456789abcdef.tmp"
        path.touch()
        now = path.stat().st_mtime_ns
        os.utime(path, ns=(now, now - age))
    dead, young = (f".stream_pack-{host ^ bit:08x}-0123456789abcdef.tmp" for bit in (1, 2))
    assert f"to be gone: {dead!r};" in remarks_of_writing(tmp_path / "target")
    assert names(tmp_path) == sorted([dead, young, "target"])


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    name = left_over(tmp_path / "target", age_ns=HOUR_NS)
    kept = [f"{name}.pack", f"x{name}", name.replace("stream_pack", "stream"), ".stream_pack-spool-0", "x.tmp"]
    for other in kept:
        (tmp_path / other).touch()
        os.utime(tmp_path / other, (0, 0))
    assert remarks_of_writing(tmp_path / "target") == ""
    assert names(tmp_path) == sorted([*kept, "target"])


def test_times_are_compared_by_the_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose clock is a day behind that of this machine stamps a living writer's file a day ago."""
    day = 24 * HOUR_NS
    name = left_over(tmp_path / "target", age_ns=day)
    touch = os.utime
    monkeypatch.setattr(os, "utime", lambda file: touch(file, ns=(0, (tmp_path / name).stat().st_mtime_ns + 1)))
    remarks_of_writing(tmp_path / "target")
    assert names(tmp_path) == [name, "target"]
    later = int(LEASE_SECONDS * 1e9) + 1
    monkeypatch.setattr(os, "utime", lambda file: touch(file, ns=(0, (tmp_path / name).stat().st_mtime_ns + later)))
    remarks_of_writing(tmp_path / "target")
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("parallel", [False, True])
def test_a_writer_renews_its_lease_while_it_waits_for_bytes(
    parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary, "RENEWAL_SECONDS", 0.01)
    specs = {"w": ("uint8", [1])}
    writer = (ParallelWriter if parallel else stream_pack.Writer)(tmp_path / "target", specs)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    while path.stat().st_mtime == 0:
        time.sleep(0.01)
    writer.abandon()
    assert names(tmp_path) == []


def test_a_process_that_was_forked_off_does_not_remove_the_file_of_its_parent(tmp_path: Path) -> None:
    program = """
import os, sys
from stream_pack.writer.sink import FileSink
sink = FileSink(sys.argv[1])
if os.fork():
    os.wait()
    sink.begin(3, reserve=True)
    sink.put(0, b"new")
    sink.commit()
sys.exit()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "target")], check=True)
    assert (tmp_path / "target").read_bytes() == b"new"
    assert names(tmp_path) == ["target"]


def test_what_a_killed_parallel_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    program = """
import os, signal, sys, stream_pack
writer = stream_pack.ParallelWriter(sys.argv[1], {"w": ("uint8", [100])})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "target")], check=False)
    assert len(names(tmp_path)) == 1
    with ParallelWriter(tmp_path / "target", {"w": ("uint8", [100])}) as pack:
        assert names(tmp_path) == [Path(pack.unfinished_path).name]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can give a process a host name")
def test_a_container_with_another_host_name_is_the_same_machine(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from stream_pack.writer.sink import FileSink
sink = FileSink(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""
    shell = 'hostname another && "$0" -c "$1" "$2"'
    argv = ["unshare", "--uts", "sh", "-c", shell, sys.executable, program, str(tmp_path / "killed")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if not names(tmp_path):
        pytest.skip(f"no other host name can be had here: {done.stderr}")
    write(tmp_path / "done")
    assert names(tmp_path) == ["done"]


def test_what_only_looks_like_an_unfinished_file_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    made = [left_over(tmp_path / "target", age_ns=HOUR_NS) for _ in range(3)]
    for name in made:
        (tmp_path / name).unlink()
    precious = tmp_path / "precious"
    precious.touch()
    os.symlink(precious, tmp_path / made[0])
    os.mkfifo(tmp_path / made[1])
    os.mkdir(tmp_path / made[2])
    before = names(tmp_path)
    assert remarks_of_writing(tmp_path / "target") == ""
    assert names(tmp_path) == sorted([*before, "target"])


def test_a_file_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Temporary(str(tmp_path), "other", private=False)
    lock = fcntl.flock
    swept: list[int] = []

    def late(file: int, how: int) -> None:
        if not swept:
            swept.append(file)
            other.sweep()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write(tmp_path / "target")
    other.discard()
    assert swept
    assert names(tmp_path) == ["target"]


def test_without_locks_the_lease_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    young = left_over(tmp_path / "target", machine=0)
    left_over(tmp_path / "target", machine=0, age_ns=HOUR_NS)
    write(tmp_path / "target")
    assert names(tmp_path) == [young, "target"]


def test_a_folder_that_cannot_be_listed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", refuse)
    write(tmp_path / "target")
    assert names(tmp_path) == ["target"]
