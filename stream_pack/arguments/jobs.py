"""How many threads may work at once, and the check of such a number."""

from __future__ import annotations

import os

from stream_pack.errors import LimitError, OptionError

__all__ = ["check_number", "cores"]


def cores() -> int:
    """The cores that this process may use: a container, or taskset, may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def check_number(name: str, number: object, *, least: int | None = None, optional: bool = False) -> None:
    """Raises: OptionError for an option that is not a whole number (or None, if ``optional``), LimitError if it is
    below ``least``."""
    if number is None and optional:
        return
    if not isinstance(number, int) or isinstance(number, bool):
        raise OptionError(f"{name}={number!r:.200}: expected a whole number")
    if least is not None and number < least:
        raise LimitError(f"{name}={number}: expected at least {least}", value=number, limit=least)
