"""A checkpoint beyond 4 GiB on its way through a pipe: nothing of it ever lies on disk or whole in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash

import stream_pack
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.chunks import Zeros
from stream_pack.sources.torch_save.zip import TorchZipSource
from tests.sources.source_suite import options, requests_for
from tests.support.memory import anonymous_nbytes
from tests.vectors.minimal_reader import integers

NBYTES = 2**32 + 1000


def state_dict() -> dict[str, torch.Tensor]:
    return {
        "before": torch.arange(3.0),
        "huge": torch.zeros(NBYTES, dtype=torch.uint8),  # pages that nobody touches
        "after": torch.arange(3.0) + 10,
    }


@contextmanager
def piped(state: dict[str, torch.Tensor]) -> Iterator[int]:
    """The reading end of a pipe into which torch saves."""
    reading, writing = os.pipe()

    def save() -> None:
        with open(writing, "wb") as target:
            torch.save(state, target)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield reading
    finally:
        os.close(reading)
        thread.join()


class Counting:
    """A byte stream that keeps the first 64 KiB and the last ones, and counts the rest."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.begin = b""
        self.end = b""
        self.peak = 0

    def write(self, data: memoryview) -> int:
        if self.nbytes < 1 << 16:
            self.begin = (self.begin + bytes(data[: 1 << 16]))[: 1 << 16]
        self.end = (self.end + bytes(data[-(1 << 16) :]))[-(1 << 16) :]
        if self.nbytes >> 26 != self.nbytes + len(data) >> 26:
            self.peak = max(self.peak, anonymous_nbytes())
        self.nbytes += len(data)
        return len(data)


def test_it_becomes_a_pack_on_its_way_into_a_stream() -> None:
    state = state_dict()
    sink = Counting()
    with piped(state) as reading:
        before = anonymous_nbytes()
        report = stream_pack.convert(reading, sink)
    assert report.verification == "CRC-32 of every record verified"
    assert report.spool_nbytes == 0
    assert sink.peak - before < 64 << 20
    # Positions by docs/FORMAT.md: 12 bytes, 4 GiB from the next page on, 12 bytes at the next multiple of 256.
    region, region_nbytes = integers(sink.begin, "Q", 8, 2)
    after = (16384 + NBYTES + 255) // 256 * 256
    assert region_nbytes == (after + 12 + 16383) // 16384 * 16384
    assert sink.begin[region : region + 12] == state["before"].numpy().tobytes()
    blocks = 1 + (NBYTES + (4 << 20) - 1) // (4 << 20) + 1
    assert sink.nbytes == report.target_nbytes == region + region_nbytes + 8 * blocks + 24
    last = state["after"].numpy().tobytes()
    at = len(sink.end) - (sink.nbytes - region - after)
    assert sink.end[at : at + 12] == last
    checksums = integers(sink.end, "Q", len(sink.end) - 24 - 8 * blocks, blocks)
    assert checksums[-1] == xxhash.xxh3_64_intdigest(last)
    assert set(checksums[1:-2]) == {xxhash.xxh3_64_intdigest(bytes(4 << 20))}
    assert checksums[-2] == xxhash.xxh3_64_intdigest(bytes(1000))


def test_a_storage_above_4_gib_comes_through_a_pipe_as_torch_writes_it() -> None:
    """Its descriptor has 24 bytes, and so has that of every record whose header lies behind it."""
    state = state_dict()
    with piped(state) as reading:
        source = TorchZipSource(ByteStream(reading))
        assert source.catalog.names == ("before", "huge", "after")
        _, requests = requests_for(source.catalog)
        received = {0: b"", 2: b""}
        passed = 0
        before = peak = anonymous_nbytes()
        for buffer, chunk in source.stream(requests, options(chunk_nbytes=4 << 20, jobs=2)):
            assert not isinstance(chunk, Zeros)
            if buffer == 1:
                passed += len(chunk)
                if passed % (64 << 20) == 0:
                    assert not any(memoryview(chunk)[:1000])
                    peak = max(peak, anonymous_nbytes())
            else:
                received[buffer] += bytes(chunk)
    assert passed == NBYTES
    assert received[0] == state["before"].numpy().tobytes()
    assert received[2] == state["after"].numpy().tobytes()
    assert source.verification == "CRC-32 of every record verified"
    assert peak - before < 64 << 20
