"""Sinks: every byte at its place whatever the system call returns, and nothing lost when it fails."""

from __future__ import annotations

import errno
import io
import os
import random
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import OptionError, StateError
from stream_pack.pipeline.chunks import Zeros
from stream_pack.writer.sink import FileSink, Sink, StreamSink, open_sink

Put = tuple[int, bytes]


def expected(nbytes: int, puts: list[Put]) -> bytes:
    out = bytearray(nbytes)
    for position, data in puts:
        out[position : position + len(data)] = data
    return bytes(out)


def fill(sink: Sink, nbytes: int, puts: list[Put]) -> None:
    with sink:
        sink.begin(nbytes, reserve=True)
        for position, data in puts:
            sink.put(position, data)
        sink.commit()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Put]]:
    """Puts in ascending order with gaps, some of them wide, and a tail."""
    puts: list[Put] = []
    position = 0
    for _ in range(draw(st.integers(0, 20))):
        position += draw(st.sampled_from([0, 0, 1, 200, 70_000]))
        data = random.Random(position).randbytes(draw(st.sampled_from([0, 1, 5, 300, 5000])))
        puts.append((position, data))
        position += len(data)
    return position + draw(st.sampled_from([0, 1, 100_000])), puts


@given(layouts(), st.randoms(use_true_random=False))
def test_a_file_holds_what_was_put_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[int, list[Put]], shuffle: random.Random
) -> None:
    nbytes, puts = layout
    path = tmp_path_factory.mktemp("sink") / "f"
    shuffled = list(puts)
    shuffle.shuffle(shuffled)
    fill(FileSink(path), nbytes, shuffled)
    assert path.read_bytes() == expected(nbytes, puts)


@given(layouts())
def test_a_stream_gets_what_was_put_with_zeros_between(layout: tuple[int, list[Put]]) -> None:
    nbytes, puts = layout
    stream = io.BytesIO()
    fill(StreamSink(stream), nbytes, puts)
    assert stream.getvalue() == expected(nbytes, puts)


SHORT: list[Callable[[int], int]] = [lambda _: 1, lambda n: min(n, 4095), lambda n: max(1, n // 2)]


@pytest.mark.parametrize("shorten", SHORT)
@pytest.mark.parametrize("call", ["pwritev", "writev"])
def test_short_writes_are_carried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shorten: Callable[[int], int], call: str
) -> None:
    real_pwrite, real_write = os.pwrite, os.write

    def pwritev(file: int, parts: list[memoryview], position: int) -> int:
        data = b"".join(parts)
        return real_pwrite(file, data[: shorten(len(data))], position)

    def writev(file: int, parts: list[memoryview]) -> int:
        data = b"".join(parts)
        return real_write(file, data[: shorten(len(data))])

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "writev", writev)
    puts = [(100 * n, random.Random(n).randbytes(97)) for n in range(200)]
    path = tmp_path / "f"
    if call == "pwritev":
        fill(FileSink(path), 20_000, puts)
    else:
        with open(path, "wb") as file:
            fill(StreamSink(file.fileno()), 20_000, puts)
    assert path.read_bytes() == expected(20_000, puts)


def test_a_raw_file_object_that_writes_little_at_a_time_gets_everything() -> None:
    class Slow(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: memoryview) -> int:  # type: ignore[override]
            self.data += bytes(data[:3])
            return min(3, len(data))

    slow = Slow()
    fill(StreamSink(slow), 50, [(0, b"0123456789"), (20, b"abcdefg")])
    assert slow.data == expected(50, [(0, b"0123456789"), (20, b"abcdefg")])


@pytest.mark.parametrize("target", ["file", "stream"])
def test_more_small_parts_than_one_system_call_takes_are_written(tmp_path: Path, target: str) -> None:
    puts = [(n, bytes([n % 251])) for n in range(3 * os.sysconf("SC_IOV_MAX"))]
    path = tmp_path / "f"
    if target == "file":
        fill(FileSink(path), len(puts), puts)
    else:
        with open(path, "wb") as file:
            fill(StreamSink(file.fileno()), len(puts), puts)
    assert path.read_bytes() == b"".join(data for _, data in puts)


def test_a_commit_leaves_nothing_in_the_buffer_of_the_callers_file(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb", buffering=1 << 20) as file:
        fill(StreamSink(file), 7, [(0, b"abcdefg")])
        assert (tmp_path / "f").read_bytes() == b"abcdefg"


@pytest.mark.parametrize("returned", [0, None])
def test_a_write_that_writes_nothing_is_an_error_not_a_loop(returned: int | None) -> None:
    class Stuck(io.RawIOBase):
        def write(self, data: memoryview) -> int | None:  # type: ignore[override]
            return returned

    with pytest.raises(OSError, match="wrote none"):
        fill(StreamSink(Stuck()), 3, [(0, b"abc")])


def test_a_file_write_that_writes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote none"):
        fill(FileSink(tmp_path / "f"), 3, [(0, b"abc")])
    assert list(tmp_path.iterdir()) == []


def test_a_stream_cannot_go_back() -> None:
    with StreamSink(io.BytesIO()) as sink:
        sink.begin(10, reserve=True)
        sink.put(5, b"abc")
        with pytest.raises(StateError, match="cannot be written backwards"):
            sink.put(2, b"x")


def test_zeros_are_holes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with FileSink(path) as sink:
        sink.begin(1 << 40, reserve=False)
        sink.put(0, b"begin")
        sink.put(5, Zeros((1 << 40) - 8))
        sink.put((1 << 40) - 3, b"end")
        sink.commit()
    assert path.stat().st_size == 1 << 40
    assert path.stat().st_blocks * 512 < 1 << 20
    with open(path, "rb") as file:
        assert os.pread(file.fileno(), 6, 0) == b"begin\0"
        assert os.pread(file.fileno(), 6, (1 << 40) - 5) == b"\0\0end"


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with FileSink(path) as sink:
        sink.begin(3, reserve=True)
        sink.put(0, b"new")
        assert path.read_bytes() == b"old"
        sink.commit()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_commit_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with FileSink(path) as sink:
        sink.begin(3, reserve=True)
        sink.put(0, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StateError):
        sink.commit()


def test_a_full_disk_is_told_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileSink(tmp_path / "f") as sink, pytest.raises(OSError, match=r"need \d+ bytes, have \d+") as caught:
        sink.begin(1 << 50, reserve=True)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_passes_and_the_temporary_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(OSError) as caught:
        fill(FileSink(path), 3, [(0, b"new")])
    assert caught.value.errno == code
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"")
    old.chmod(0o604)
    before = os.umask(0o027)
    try:
        fill(FileSink(new), 1, [(0, b"x")])
        fill(FileSink(old), 1, [(0, b"x")])
    finally:
        os.umask(before)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert stat.S_IMODE(old.stat().st_mode) == 0o604


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_keeps_the_owner_of_a_file_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    os.chown(path, 1234, 2345)
    fill(FileSink(path), 1, [(0, b"x")])
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


def test_a_symlink_is_followed_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "f").write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to("elsewhere/f")
    fill(FileSink(link), 3, [(0, b"new")])
    assert link.is_symlink()
    assert (folder / "f").read_bytes() == b"new"
    dangling = tmp_path / "dangling"
    dangling.symlink_to("elsewhere/made")
    fill(FileSink(dangling), 3, [(0, b"new")])
    assert (folder / "made").read_bytes() == b"new"


def test_another_name_of_the_replaced_file_keeps_the_old_bytes(tmp_path: Path) -> None:
    path, other = tmp_path / "f", tmp_path / "other"
    path.write_bytes(b"old")
    os.link(path, other)
    fill(FileSink(path), 3, [(0, b"new")])
    assert (path.read_bytes(), other.read_bytes()) == (b"new", b"old")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_sink(tmp_path)


def test_a_fifo_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    fill(open_sink(path), 8, [(2, b"abc")])
    reader.join()
    assert got == [b"\0\0abc\0\0\0"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device file")
def test_a_full_device_is_an_error_and_stays_a_device(tmp_path: Path) -> None:
    path = tmp_path / "full"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        descriptor = os.open(path, os.O_WRONLY)
    except PermissionError:
        pytest.skip("this file system does not allow device files")
    os.close(descriptor)
    with pytest.raises(OSError) as caught:
        fill(open_sink(path), 8, [(2, b"abc")])
    assert caught.value.errno == errno.ENOSPC
    assert stat.S_ISCHR(path.stat().st_mode)


def test_what_is_no_target_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="expected a path"):
        open_sink(3.5)  # type: ignore[arg-type]


def test_a_pipe_that_does_not_block_is_waited_for(tmp_path: Path) -> None:
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    data = random.Random(1).randbytes(1 << 20)  # sixteen times what a pipe holds
    got: list[bytes] = []

    def receive() -> None:
        with open(receiving, "rb") as file:
            got.append(file.read())

    reader = threading.Thread(target=receive)
    reader.start()
    try:
        fill(StreamSink(sending), len(data), [(0, data)])
    finally:
        os.close(sending)
        reader.join()
    assert got == [data]


def test_the_file_is_on_disk_before_it_gets_its_name_and_the_name_before_the_commit_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of POSIX: data that is not synced may be lost although the new name is there, and so may the name."""
    path = tmp_path / "f"
    path.write_bytes(b"old")
    calls: list[tuple[str, object]] = []
    replace = os.replace

    def record_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            calls.append(("fsync of folder", status.st_ino))
        else:
            # All that was put has been written by now, the part that a sink holds back too.
            calls.append(("fsync of file", os.pread(descriptor, 100, 0)))
            calls.append(("its number", status.st_ino))

    def record_replace(new: str, old: str) -> None:
        calls.append(("replace", (Path(new).parent, Path(old))))
        replace(new, old)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with FileSink(path) as sink:
        sink.begin(9, reserve=True)
        sink.put(6, b"xyz")
        sink.put(0, b"abc")
        assert calls == []
        sink.commit()
        assert calls == [
            ("fsync of file", b"abc\0\0\0xyz"),
            ("its number", path.stat().st_ino),
            ("replace", (tmp_path, path)),
            ("fsync of folder", tmp_path.stat().st_ino),
        ]


def test_a_file_that_cannot_be_synced_never_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "f"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        fill(FileSink(path), 3, [(0, b"new")])
    assert caught.value.errno == errno.EIO
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_that_is_synced_is_the_one_a_symlink_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "link").symlink_to("elsewhere/f")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    fill(FileSink(tmp_path / "link"), 3, [(0, b"new")])
    assert synced == [(folder / "f").stat().st_ino, folder.stat().st_ino]


def test_an_interrupt_right_after_the_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def interrupted(source: str, target: str) -> None:
        real(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(FileSink(tmp_path / "f"), 3, [(0, b"new")])
    assert (tmp_path / "f").read_bytes() == b"new"


def as_nobody(action: Callable[[], None]) -> int:
    """The exit status of a child that has given up its rights: 0 when ``action`` raised nothing."""
    pid = os.fork()
    if not pid:
        try:
            os.setgid(65534)
            os.setuid(65534)
            action()
            os._exit(0)
        except PermissionError:
            os._exit(13)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may reach, as pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")


@needs_root
def test_a_folder_that_may_be_written_but_not_read_takes_a_pack(open_folder: Path) -> None:
    os.chmod(open_folder, 0o333)
    path = open_folder / "f"
    assert as_nobody(lambda: fill(FileSink(path), 3, [(0, b"new")])) == 0
    assert path.read_bytes() == b"new"


@needs_root
def test_a_folder_that_may_not_be_written_is_a_permission_error(open_folder: Path) -> None:
    os.chmod(open_folder, 0o555)
    assert as_nobody(lambda: fill(FileSink(open_folder / "f"), 3, [(0, b"new")])) == 13
    assert list(open_folder.iterdir()) == []


@needs_root
def test_a_file_of_another_user_in_a_sticky_folder_is_refused_at_once(open_folder: Path) -> None:
    os.chmod(open_folder, 0o1777)
    path = open_folder / "f"
    path.write_bytes(b"old")
    assert as_nobody(lambda: FileSink(path).abort()) == 13
    assert list(open_folder.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_modes_takes_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fchmod", refuse)
    path = tmp_path / "f"
    path.write_bytes(b"old")
    fill(FileSink(path), 3, [(0, b"new")])
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no such advice")
def test_the_disk_begins_with_what_was_written_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, position, nbytes, __: told.append((position, nbytes)))
    with FileSink(tmp_path / "f") as sink:
        sink.begin(64 << 20, reserve=True)
        for position in [*range(0, 20 << 20, 1 << 20), *range(40 << 20, 60 << 20, 1 << 20)]:
            sink.put(position, bytes(1 << 20))
        before_the_end = list(told)
        sink.commit()
    assert before_the_end
    for begin, end in ((0, 20 << 20), (40 << 20, 60 << 20)):
        mine = [(at, nbytes) for at, nbytes in told if begin <= at < end]
        assert mine[0][0] == begin
        assert sum(nbytes for _, nbytes in mine) >= 16 << 20
        assert all(at + nbytes <= end for at, nbytes in mine)


def test_advice_that_a_file_system_refuses_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    data = bytes(range(256)) * (36 << 10)
    fill(FileSink(tmp_path / "f"), len(data), [(0, data)])
    assert (tmp_path / "f").read_bytes() == data
