"""The plan of a file of another format: which bytes of the source it holds, and where, and what is around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import UnsupportedTensorError
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import DTYPES
from stream_pack.pipeline.source import Requests
from stream_pack.text import quoted

__all__ = ["FilePlan", "Frame", "check_dtypes", "offsets_after"]


class Frame(Protocol):
    """What a format has directly around the tensors, and behind all of them.  Buffers are the requests of the plan.

    Needed where that depends on a CRC-32 of the tensors' bytes.
    """

    def before(self, buffer: int) -> bytes:
        """The bytes that end where ``buffer`` begins.  Called with rising numbers where the target is a stream."""

    def crc_before(self, buffer: int) -> int:
        """The CRC-32 of that end of them which is checked together with the buffer; 0 if there is none."""

    def after(self, buffer: int, crc: int) -> bytes:
        """The bytes that begin where ``buffer`` ends; ``crc`` is its CRC-32, continued from :meth:`crc_before`."""

    def tail(self, crcs: Sequence[int]) -> bytes:
        """The last bytes of the file, given the CRC-32 of every buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """A file to be written.

    ``requests`` are the tensors in the order of the file, ``rows`` their rows in the catalog, ``offsets`` where each
    begins.  ``head``: what is known in advance, with where it begins.  ``frame``: what is not.  ``dropped`` names the
    tensors that are left out because another has the same bytes.

    Units: bytes; offsets count from the file's first byte.
    """

    requests: Requests
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    nbytes: int
    head: tuple[tuple[int, bytes], ...] = ()
    frame: Frame | None = None
    dropped: tuple[str, ...] = ()


def offsets_after(begin: int, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where tensors begin that follow one another from ``begin`` on."""
    return begin + np.cumsum(nbytes) - nbytes


def check_dtypes(catalog: Catalog, known: Sequence[bool], *, target: str, advice: str) -> None:
    """Refuse tensors whose dtypes (numbers in ``DTYPES``) are not ``known`` to ``target``.

    Raises: UnsupportedTensorError naming the first, and ``advice``.
    """
    wrong = np.flatnonzero(~np.array(known)[catalog.dtypes])
    if len(wrong):
        row = int(wrong[0])
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UnsupportedTensorError(
            f"tensor {quoted(catalog.names[row])}{more} is {DTYPES[catalog.dtypes[row]].name}, which {target} does not "
            f"have: {advice}, or leave it out with --exclude (exclude=)",
            tensor=catalog.names[row],
        )
