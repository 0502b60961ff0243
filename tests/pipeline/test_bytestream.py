"""The byte stream: the same bytes from a file, a pipe and any object with ``read``."""

from __future__ import annotations

import gzip
import io
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream_pack.errors import OptionError, SourceError, TruncatedSourceError
from stream_pack.pipeline.bytestream import ByteStream
from tests.sources.byte_sources import Dribble

DATA = bytes(range(256)) * 1200  # 307,200 bytes: several times the read-ahead


class WithReadInto(io.RawIOBase):
    """A raw file object that gives at most 1,000 bytes at a time and cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        memory = memoryview(buffer)[:1000]  # type: ignore[arg-type]
        return self._data.readinto(memory)


def _file(data: bytes, folder: Path, stack: ExitStack) -> ByteStream:
    path = folder / "data"
    path.write_bytes(data)
    stream = ByteStream.open_path(path)
    stack.callback(stream.close)
    return stream


def _pipe(data: bytes, folder: Path, stack: ExitStack) -> ByteStream:
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), open(writing, "wb") as target:
            target.write(data)

    threading.Thread(target=write, daemon=True).start()
    stack.callback(os.close, reading)
    return ByteStream(reading)


def _socket(data: bytes, folder: Path, stack: ExitStack) -> ByteStream:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(ConnectionError), theirs:
            theirs.sendall(data)

    threading.Thread(target=send, daemon=True).start()
    stack.enter_context(ours)
    return ByteStream(stack.enter_context(ours.makefile("rb")))


def _gzip(data: bytes, folder: Path, stack: ExitStack) -> ByteStream:
    path = folder / "data.gz"
    path.write_bytes(gzip.compress(data))
    return ByteStream(stack.enter_context(gzip.open(path)))


MAKERS: dict[str, Callable[[bytes, Path, ExitStack], ByteStream]] = {
    "file": _file,
    "pipe": _pipe,
    "socket": _socket,
    "gzip": _gzip,
    "memory": lambda data, *_: ByteStream(io.BytesIO(data)),
    "read of three bytes": lambda data, *_: ByteStream(Dribble(data)),
    "readinto of 1,000 bytes": lambda data, *_: ByteStream(WithReadInto(data)),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[bytes], ByteStream]]:
    with ExitStack() as stack:
        yield lambda data: MAKERS[request.param](data, tmp_path, stack)


def test_reads_of_every_kind_go_on_where_the_last_one_ended(make: Callable[[bytes], ByteStream]) -> None:
    stream = make(DATA)
    assert stream.peek(5) == DATA[:5]
    assert stream.position == 0
    assert bytes(stream.read_exactly(3, what="it")) == DATA[:3]
    assert bytes(stream.read_exactly(100_000, what="it")) == DATA[3:100_003]
    chunks = list(stream.chunks(70_000, chunk_nbytes=32_768, what="it"))
    assert [len(chunk) for chunk in chunks] == [32_768, 32_768, 4_464]
    assert b"".join(chunks) == DATA[100_003:170_003]
    stream.skip(100_000, what="it")
    assert stream.position == 270_003
    some = stream.read_some()
    assert len(some) > 0
    assert DATA[270_003:].startswith(some)
    stream.unread(some[1:])
    assert stream.position == 270_004
    assert bytes(stream.read_exactly(307_200 - 270_004, what="it")) == DATA[270_004:]
    assert stream.at_end()
    assert stream.peek(1) == b""
    assert stream.read_some() == b""


def test_chunks_of_one_byte_are_all_bytes_in_order(make: Callable[[bytes], ByteStream]) -> None:
    stream = make(DATA[:300])
    assert b"".join(stream.chunks(300, chunk_nbytes=1, what="it")) == DATA[:300]


@pytest.mark.parametrize("nbytes", [11, 200_000])
def test_an_early_end_says_where_inside_what_and_how_much_is_missing(
    make: Callable[[bytes], ByteStream], nbytes: int
) -> None:
    stream = make(DATA[:10])
    with pytest.raises(TruncatedSourceError) as caught:
        stream.read_exactly(nbytes, what="the header")
    assert "ends at byte 10, inside the header" in str(caught.value)
    assert f"{nbytes - 10} bytes more" in str(caught.value)
    assert bytes(stream.read_exactly(10, what="it")) == DATA[:10]


def test_skipping_beyond_the_end_is_truncated(make: Callable[[bytes], ByteStream]) -> None:
    with pytest.raises(TruncatedSourceError, match="5 bytes more"):
        make(DATA[:10]).skip(15, what="it")


def test_memory_that_was_handed_out_is_never_written_again(make: Callable[[bytes], ByteStream]) -> None:
    stream = make(DATA)
    chunks = list(stream.chunks(len(DATA), chunk_nbytes=100_000, what="it"))
    assert b"".join(chunks) == DATA


def test_a_descriptor_is_read_from_where_it_stands_and_does_not_move(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    try:
        os.lseek(fd, 64, os.SEEK_SET)
        stream = ByteStream(fd)
        assert stream.file_nbytes == len(DATA) - 64
        assert stream.regular_file == (fd, 64)
        assert bytes(stream.read_exactly(3, what="it")) == DATA[64:67]
        stream.seek(1000)
        assert bytes(stream.read_exactly(3, what="it")) == DATA[1064:1067]
        stream.seek(0)
        assert stream.peek(2) == DATA[64:66]
        assert os.lseek(fd, 0, os.SEEK_CUR) == 64
        stream.close()
        os.fstat(fd)  # still open: it is the caller's
    finally:
        os.close(fd)


def test_a_buffered_file_object_is_read_from_where_its_reader_stands(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    with open(tmp_path / "data", "rb") as file:
        file.read(10)
        stream = ByteStream(file)
        assert stream.regular_file is not None
        assert bytes(stream.read_exactly(4, what="it")) == DATA[10:14]
        stream.close()
        assert not file.closed


def test_the_file_behind_a_decompressor_is_not_taken_for_its_bytes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert _gzip(DATA, tmp_path, stack).regular_file is None


def test_a_buffer_over_something_else_than_a_file_is_read_through_the_buffer() -> None:
    stream = ByteStream(io.BufferedReader(WithReadInto(DATA)))
    assert stream.regular_file is None
    assert bytes(stream.read_exactly(5000, what="it")) == DATA[:5000]


def test_a_path_that_was_opened_is_closed_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    before = len(os.listdir("/proc/self/fd"))
    stream = ByteStream.open_path(tmp_path / "data")
    stream.close()
    stream.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_seeking_in_a_pipe_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(io.UnsupportedOperation, match="only once"):
        _pipe(b"", tmp_path, stack).seek(0)


def test_wherever_a_file_is_read_it_gives_what_stands_there(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    data = generator.bytes(400_000)  # without a period, in which a wrong place could hide
    with ExitStack() as stack:
        stream = _file(data, tmp_path, stack)
        for _ in range(2000):
            begin = int(generator.integers(len(data)))
            if generator.random() < 0.5:  # a little back, or on
                begin = max(0, stream.position - int(generator.integers(100_000)))
            stream.seek(begin)
            for nbytes in generator.choice([1, 100, 65_536, 65_537, 150_000], 2).tolist():
                nbytes = min(nbytes, len(data) - stream.position)
                expected = data[stream.position : stream.position + nbytes]
                assert stream.peek(min(nbytes, 50)) == expected[:50]
                assert bytes(stream.read_exactly(nbytes, what="it")) == expected


def test_a_signal_while_waiting_for_a_pipe_loses_nothing() -> None:
    reading, writing = os.pipe()
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_then_write() -> None:
        while not caught:
            signal.pthread_kill(main, signal.SIGUSR1)
        os.write(writing, b"after")
        os.close(writing)

    thread = threading.Thread(target=interrupt_then_write)
    thread.start()
    try:
        assert bytes(ByteStream(reading).read_exactly(5, what="it")) == b"after"
        assert caught
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        os.close(reading)


def test_a_descriptor_in_non_blocking_mode_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    go = threading.Event()

    def write() -> None:
        go.wait()
        os.write(writing, b"late")
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        go.set()
        assert bytes(ByteStream(reading).read_exactly(4, what="it")) == b"late"
    finally:
        thread.join()
        os.close(reading)


def test_a_text_file_object_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(OptionError, match="text mode: open it in binary mode"):
        ByteStream(io.StringIO("text"))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="gives text: open it in binary mode"):
        ByteStream(Giving("text")).peek(1)


class Lying(io.RawIOBase):
    """Its ``readinto`` says whatever it is told to."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def readinto(self, buffer: object, /) -> Any:
        return self._answer


@pytest.mark.parametrize("nbytes", [10, 100_000])  # by way of the read-ahead, and past it
@pytest.mark.parametrize("answer", [-1, 1 << 20, 1 << 70, 2.0, "2", b"12"])
def test_a_readinto_that_returns_no_possible_length_is_refused(answer: object, nbytes: int) -> None:
    with pytest.raises(SourceError, match="not a binary file object"):
        ByteStream(Lying(answer)).read_exactly(nbytes, what="it")


class Giving:
    """Its ``read`` gives whatever it is told to, once."""

    def __init__(self, *given: Any) -> None:
        self._left = [b"", *given]

    def read(self, nbytes: int, /) -> Any:
        return self._left.pop()


@pytest.mark.parametrize("given", [7, 2.0, ["a"], bytes(1 << 20), memoryview(DATA)[::2]])
def test_a_read_that_gives_no_bytes_or_too_many_is_refused(given: object) -> None:
    with pytest.raises(SourceError, match="not a binary file object"):
        ByteStream(Giving(given)).read_exactly(10, what="it")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "<u2")])
def test_a_read_may_give_bytes_in_any_wrapping(kind: Callable[[bytes], Any]) -> None:
    assert bytes(ByteStream(Giving(kind(b"1234"))).read_exactly(4, what="it")) == b"1234"


def test_a_closed_descriptor_is_the_operating_systems_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match="Bad file descriptor"):
        ByteStream(reading).peek(1)


def test_a_range_of_a_file_is_a_stream_that_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    stream = ByteStream.open_range(path, 10, 20)
    assert (stream.position, stream.file_nbytes) == (0, 20)
    assert stream.peek(500) == bytes(range(10, 30))
    assert bytes(stream.read_exactly(20, what="all")) == bytes(range(10, 30))
    assert stream.at_end()
    stream.seek(15)
    with pytest.raises(TruncatedSourceError) as caught:
        stream.read_exactly(6, what="too much")
    assert caught.value.missing_nbytes == 1
    stream.close()
    beyond = ByteStream.open_range(path, 90, 20)
    assert beyond.file_nbytes == 10
    beyond.close()
    with pytest.raises(io.UnsupportedOperation, match="not a regular file"):
        ByteStream.open_range("/dev/null", 0, 1)


def test_each_read_of_the_source_tells_its_bytes_until_on_read_is_reset() -> None:
    stream = ByteStream(io.BytesIO(bytes(1 << 20)))
    told: list[int] = []
    stream.on_read = told.append
    for _ in range(512):
        stream.read_exactly(1000, what="bytes")
    assert told == [65536] * 8  # the read-ahead
    stream.read_exactly(300_000, what="bytes")
    assert sum(told) == 812_000
    count = len(told)
    stream.on_read = None
    stream.skip(100_000, what="bytes")
    assert len(told) == count
