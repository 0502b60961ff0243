"""What the kernel says of a mapped file: how it is mapped, and how many private copies of its pages exist."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MappedFile", "mapped_file"]


@dataclass(frozen=True, slots=True)
class MappedFile:
    """The entries of one file in /proc/self/smaps, their lengths in bytes added up.

    ``permissions``: one string an entry, such as ``"r--s"`` (read-only, shared) or ``"rw-p"``.
    ``anonymous``: pages that were copied because somebody wrote to them.  (Private_Dirty is no sign of a copy: it
    also counts pages of a file just written that still have to reach the disk.)
    """

    permissions: tuple[str, ...]
    nbytes: int
    resident: int
    anonymous: int


def mapped_file(path: str | os.PathLike[str]) -> MappedFile:
    """Every mapping of ``path`` in this process; one without entries when there is none.

    A name that contains newlines or ends in " (deleted)" is not found: the kernel writes those differently.
    """
    wanted = os.path.realpath(path)
    permissions: list[str] = []
    totals = {"Size": 0, "Rss": 0, "Anonymous": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
        field, _, value = line.partition(":")
        if " " in field:
            # begin-end perms offset device inode path: the first colon is the device's
            entry = line.split(maxsplit=5)
            inside = len(entry) == 6 and entry[5] == wanted
            if inside:
                permissions.append(entry[1])
        elif inside and field in totals:
            totals[field] += int(value.split()[0]) * 1024
    return MappedFile(
        permissions=tuple(permissions), nbytes=totals["Size"], resident=totals["Rss"], anonymous=totals["Anonymous"]
    )
