"""Exit codes, which scripts rely on."""

from __future__ import annotations

__all__ = ["BROKEN_PIPE", "DAMAGE", "DIFFERENT", "DONE", "INPUT", "MACHINE", "USAGE", "UsageError"]

DONE = 0
DAMAGE = 1
DIFFERENT = 1
"""Of ``diff``, as ``cmp`` and ``diff`` have it; no other of its ends has this code."""

USAGE = 2
INPUT = 3
MACHINE = 4
BROKEN_PIPE = 128 + 13
"""What a shell reports for a program that SIGPIPE ended."""


class UsageError(Exception):
    """The command line is wrong."""
