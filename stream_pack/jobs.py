"""How many threads may work at once."""

from __future__ import annotations

import os

from stream_pack.errors import LimitError, OptionError

__all__ = ["check_jobs", "cores"]


def cores() -> int:
    """The cores that this process may use: a container, or taskset, may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def check_jobs(jobs: object) -> int | None:
    """``jobs`` as a caller gave it; None for the default.

    Raises: OptionError for what is no whole number, LimitError below 1.
    """
    if jobs is None:
        return None
    if not isinstance(jobs, int) or isinstance(jobs, bool):
        raise OptionError(f"jobs={jobs!r}: expected a whole number")
    if jobs < 1:
        raise LimitError(f"{jobs} jobs: expected at least 1", value=jobs, limit=1)
    return jobs
