"""torch ignores short writes: an unbuffered stdout takes at most 0x7ffff000 bytes at once, and the rest is lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stream_pack.errors import SourceError
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.torch_save.zip import TorchZipSource
from tests.sources.source_suite import options, requests_for

NBYTES = 2**31 + (1 << 20)
PROGRAM = f"import sys, torch; torch.save({{'w': torch.zeros({NBYTES}, dtype=torch.uint8)}}, sys.stdout.buffer)"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a single write is Linux's")
def test_a_storage_that_lost_its_tail_to_a_short_write_is_refused() -> None:
    """PT#1031: zeros on disk, exit code 0."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM], stdout=subprocess.PIPE, env=dict(os.environ)
    ) as producer:
        assert producer.stdout is not None
        source = TorchZipSource(ByteStream(producer.stdout.fileno()))
        _, requests = requests_for(source.catalog)
        assert requests.nbytes.tolist() == [NBYTES]
        with pytest.raises(SourceError, match=r"short write upstream|ends at byte"):
            for _ in source.stream(requests, options(chunk_nbytes=4 << 20, jobs=2)):
                pass
        producer.stdout.read()
        producer.stdout.close()
    assert producer.returncode == 0
