"""Large tests are slow: they take gigabytes of disk, and measure whole processes."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
QUICK = {"test_et_files.py", "test_larger_than_memory.py", "test_metal.py"}
"""Sparse files of which a few bytes are read."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
