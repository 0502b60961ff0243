"""A checkpoint beyond 4 GiB on its way through a pipe: nothing of it ever lies on disk or whole in memory."""

from __future__ import annotations

import os
import threading

import torch

from stream_pack.writer.bytestream import ByteStream
from stream_pack.writer.source import Zeros
from stream_pack.writer.torch_zip import TorchZipSource
from tests.support.memory import anonymous_nbytes
from tests.writer.source_suite import options, requests_for

NBYTES = 2**32 + 1000


def test_a_storage_above_4_gib_comes_through_a_pipe_as_torch_writes_it() -> None:
    """Its descriptor has 24 bytes, and so has that of every record whose header lies behind it."""
    reading, writing = os.pipe()
    state = {
        "before": torch.arange(3.0),
        "huge": torch.zeros(NBYTES, dtype=torch.uint8),  # pages that nobody touches
        "after": torch.arange(3.0) + 10,
    }

    def save() -> None:
        with open(writing, "wb") as target:
            torch.save(state, target)

    thread = threading.Thread(target=save)
    thread.start()
    try:
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
    finally:
        os.close(reading)
        thread.join()
    assert passed == NBYTES
    assert received[0] == state["before"].numpy().tobytes()
    assert received[2] == state["after"].numpy().tobytes()
    assert source.verification == "CRC-32 of every record verified"
    assert peak - before < 64 << 20
