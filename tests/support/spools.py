"""Where spools go in tests: real ones of a few kilobytes stay in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stream_pack.sources import open as opening
from stream_pack.writer import convert, needs

__all__ = ["needs_memory_files", "on_disk", "without_a_folder"]

needs_memory_files = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")


@contextmanager
def on_disk() -> Iterator[None]:
    """Inside, nothing waits in memory, as on a system that has no files in memory."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (opening, convert, needs):
            patch.setattr(module, "MEMORY_NBYTES", 0)
        yield


@contextmanager
def without_a_folder() -> Iterator[None]:
    """Inside, nothing waits in memory, and the system has no folder for it, as ``tempfile.gettempdir`` says it."""

    def gettempdir() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp']")

    with on_disk(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "gettempdir", gettempdir)
        yield
