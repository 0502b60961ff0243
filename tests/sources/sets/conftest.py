"""What holds for every set: whatever happens, its files are given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_file_stays_open(tmp_path: Path) -> Iterator[None]:
    """LC#16765: a set is many files, and they are not forgotten but for the last one."""
    yield
    if opened_below(tmp_path):
        gc.collect()  # what only a traceback kept
    assert opened_below(tmp_path) == []


def opened_below(folder: Path) -> list[Path]:
    opened = (path.resolve() for path in Path("/proc/self/fd").iterdir())
    return [path for path in opened if path.is_relative_to(folder)]
