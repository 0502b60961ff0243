"""How much memory of its own a program needs at most.

The figure is the peak of ``RssAnon`` in /proc/<pid>/status: resident pages that no file stands behind.  It is what
counts when a machine runs out of memory; pages of mapped files and the page cache can be dropped at any time.

The kernel keeps a high-water mark only for all resident pages (``VmHWM``), which counts mapped files too, and
``ru_maxrss`` also counts what the parent had before exec.  So the parent samples, once a millisecond: from outside,
because a thread inside the child would wait for its interpreter's lock, and C code keeps that for long.  What
sampling can miss is what a program takes and gives back between two samples.  Fresh pages have to be zeroed
first, at a few GiB/s, so at one sample a millisecond that is a few MiB.
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
    status = Path(f"/proc/{'self' if pid is None else pid}/status").read_text()
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # a zombie has no memory, and no such line


def measure(
    argv: Sequence[str | os.PathLike[str]],
    *,
    stdin: IO[bytes] | int | None = None,
    stdout: IO[bytes] | None = None,
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
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_nbytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
        captured.seek(0)
        stderr.seek(0)
        output = captured.read()
        if process.returncode:
            error = subprocess.CalledProcessError(process.returncode, list(argv), output)
            raise AssertionError(f"{error}\n{stderr.read().decode(errors='replace')}") from error
    return Measured(peak, output)


def peak_anonymous_nbytes(
    argv: Sequence[str | os.PathLike[str]], *, stdin: IO[bytes] | int | None = None
) -> int:
    """The peak of a program's resident anonymous memory, as :func:`measure` finds it."""
    return measure(argv, stdin=stdin).peak_anonymous_nbytes
