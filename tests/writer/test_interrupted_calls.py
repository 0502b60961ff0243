"""Signals that arrive in the middle of reads and writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import stream_pack

TENSORS = {f"w{n}": np.random.default_rng(n).integers(0, 256, 700_001, np.uint8) for n in range(8)}
SOURCE = safetensors.numpy.save(TENSORS)

# The handler is Python's, so a call that a signal ends early returns to the interpreter first (PEP 475); and the kernel
# does not restart calls by itself, so every one that waits for a pipe is ended early.
STORM = """
import os, signal, sys
from stream_pack.writer.convert import convert
count = 0
def handler(signum, frame):
    global count
    count += 1
signal.signal(signal.SIGALRM, handler)
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
"""
CALM = "signal.setitimer(signal.ITIMER_REAL, 0)\n"
CONVERT = 'convert(0, 1 if sys.argv[1] == "-" else sys.argv[1], jobs=int(sys.argv[2]))\n'
COUNT = "print(count, file=sys.stderr)\n"
WRITES = "lengths = [os.writev(1, [bytes(1 << 20)]) for _ in range(3)]\n"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("undisturbed") / "pack"
    stream_pack.convert(TENSORS, path)
    return path.read_bytes()


@pytest.mark.parametrize("jobs", ["1", "4"])
@pytest.mark.parametrize("to", ["pipe", "file"])
def test_signals_during_reads_and_writes_change_nothing(to: str, jobs: str, undisturbed: bytes, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    program = STORM + CONVERT + CALM + COUNT
    argv = [sys.executable, "-c", program, "-" if to == "pipe" else str(target), jobs]
    # Both pipes hold a fraction of what goes through: the program waits at either end again and again.
    done = subprocess.run(argv, input=SOURCE, capture_output=True, check=True)
    assert (done.stdout if to == "pipe" else target.read_bytes()) == undisturbed
    assert int(done.stderr) > 20


def test_the_storm_ends_writes_early() -> None:
    program = STORM + WRITES + CALM + "print(*lengths, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    lengths = [int(length) for length in done.stderr.split()]
    assert sum(lengths) == len(done.stdout)
    assert min(lengths) < 1 << 20
