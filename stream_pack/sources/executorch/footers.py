"""Detects a damaged pack that looks like a raw payload: without its locator it looks like ExecuTorch's own."""

from __future__ import annotations

from collections.abc import Iterable

from stream_pack.errors import FormatError
from stream_pack.format.records import Footer

__all__ = ["FooterWatch", "damaged_head"]

_NBYTES = len(Footer.MAGIC)


class FooterWatch:
    """Looks at the last bytes of payloads that end at ``ends``, in file offsets."""

    def __init__(self, ends: Iterable[int]) -> None:
        self._ends = sorted(ends, reverse=True)
        self._position = 0
        self._tail = b""

    def advance(self, position: int, chunk: bytes | bytearray | memoryview) -> None:
        """See the bytes from ``position`` on, none of which may have been seen before.

        Raises: FormatError when a payload ends with the footer of a pack.
        """
        if position != self._position:
            self._tail = b""
        self._position = position + len(chunk)
        while self._ends and self._ends[-1] <= self._position:
            end = self._ends.pop() - position
            if Footer.stands_before(self._tail + bytes(chunk[max(0, end - _NBYTES) : max(0, end)])):
                raise damaged_head(f"the payload that ends at byte {position + end}")
        self._tail = (self._tail + bytes(chunk[-_NBYTES:]))[-_NBYTES:]


def damaged_head(what: str) -> FormatError:
    """What to raise of something that has a footer, and was not known to be a pack."""
    return FormatError(
        f"{what} ends with the footer of a pack, whose head is damaged: it would have been taken for a raw payload, "
        "and nothing of it verified"
    )
