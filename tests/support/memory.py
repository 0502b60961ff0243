"""How much memory of its own a program needs at most.

The figure is the peak of ``RssAnon`` in /proc/<pid>/status: resident pages that no file stands behind.  It is what
counts when a machine runs out of memory; pages of mapped files and the page cache can be dropped at any time.

The kernel keeps no high-water mark of just that, so the parent samples, once a millisecond: from outside, because a
thread inside the child would wait for its interpreter's lock, and C code keeps that for long.  On a busy machine
samples come late, and what a program takes and gives back between two of them goes unseen.  But the kernel does keep
the high-water mark of all resident pages (``VmHWM``; ``ru_maxrss`` is no use, it also counts what the parent had
before exec).  When that was reached, at most as many pages were mapped from files as ever were, so the rest were
anonymous.  The greater of the two figures is the peak.  One that is seen late is not lost, then, as long as the
program lives on; and where many file pages come and go between samples the error is to the side of too much.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

__all__ = ["Measured", "anonymous_nbytes", "measure", "needs_proc", "peak_anonymous_nbytes"]

SAMPLE_SECONDS = 0.001

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="memory is measured through Linux's /proc"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A program that ran and ended well: its peak, and what it wrote to stdout."""

    peak_anonymous_nbytes: int
    stdout: bytes


def anonymous_nbytes(pid: int | None = None) -> int:
    """Resident anonymous memory of a process (None: this one), now.  0 once it has ended."""
    return _resident("self" if pid is None else pid)["RssAnon"]


def _resident(pid: int | str) -> dict[str, int]:
    """What /proc/<pid>/status says of resident memory, in bytes."""
    found = dict.fromkeys(("VmHWM", "RssAnon", "RssFile", "RssShmem"), 0)
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        field, _, value = line.partition(":")
        if field in found:
            found[field] = int(value.split()[0]) * 1024
    return found  # a zombie has no memory, and no such lines


def measure(
    argv: Sequence[str | os.PathLike[str]], *, stdin: IO[bytes] | int | None = None, stdout: IO[bytes] | None = None
) -> Measured:
    """Run a program to its end and tell its peak of resident anonymous memory, its children's not included.

    ``stdin``: as for :class:`subprocess.Popen`; None is an empty input.  ``stdout``: a file for its output, which is
    then not part of the result.

    Raises: AssertionError, with the program's stderr in its text, when it fails.
    """
    with tempfile.TemporaryFile() as captured, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=captured if stdout is None else stdout,
            stderr=stderr,
        )
        # Popen returns after exec, so no sample sees the memory of a process that was only forked.
        sampled = mapped = high_water = 0
        while process.poll() is None:
            resident = _resident(process.pid)
            sampled = max(sampled, resident["RssAnon"])
            mapped = max(mapped, resident["RssFile"] + resident["RssShmem"])
            high_water = max(high_water, resident["VmHWM"])
            time.sleep(SAMPLE_SECONDS)
        captured.seek(0)
        stderr.seek(0)
        output = captured.read()
        if process.returncode:
            error = subprocess.CalledProcessError(process.returncode, list(argv), output)
            raise AssertionError(f"{error}\n{stderr.read().decode(errors='replace')}") from error
    return Measured(max(sampled, high_water - mapped), output)


def peak_anonymous_nbytes(argv: Sequence[str | os.PathLike[str]], *, stdin: IO[bytes] | int | None = None) -> int:
    """The peak of a program's resident anonymous memory, as :func:`measure` finds it."""
    return measure(argv, stdin=stdin).peak_anonymous_nbytes
