"""Files of gigabytes that take no room: what is zero is a hole."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch

__all__ = ["nbytes_read", "save_sparse"]

STEP_NBYTES = 1 << 24


class _Sparse(io.RawIOBase):
    """Takes what ``torch.save`` writes, and seeks over zeros."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for begin in range(0, len(view), STEP_NBYTES):
            step = view[begin : begin + STEP_NBYTES]
            if len(step) > 4096 and not np.frombuffer(step, np.uint8).any():
                self._file.seek(len(step), os.SEEK_CUR)
            else:
                self._file.write(step)
        return len(view)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            self._file.truncate()
            self._file.close()
        super().close()


def save_sparse(state: object, path: Path, **options: bool) -> None:
    """``torch.save`` of tensors that are zero."""
    with _Sparse(path) as file:
        torch.save(state, cast("IO[bytes]", file), **options)


def nbytes_read() -> int:
    """How many bytes this process has read so far, from files and pipes (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
