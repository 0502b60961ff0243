"""Where in a planned file the bytes of a source belong, as a stage of the flow."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np

from stream_pack.errors import SourceError, TruncatedSourceError
from stream_pack.extraction.file_plan import FilePlan
from stream_pack.format.catalog import Catalog
from stream_pack.format.checksum import zeros
from stream_pack.pipeline.chunks import Chunk, Piece, Zeros
from stream_pack.text import quoted

__all__ = ["Placing"]


class Placing:
    """Places the pieces of one file, and makes what its frame has around them."""

    def __init__(self, plan: FilePlan, catalog: Catalog) -> None:
        self._plan = plan
        self._catalog = catalog
        count = len(plan.requests)
        self._filled = np.zeros(count, np.int64)
        self._crcs = np.zeros(count, np.uint32)

    def place(self, pieces: Iterator[Piece]) -> Iterator[tuple[int, Chunk]]:
        """Each piece with its offset in the file.

        Raises: SourceError when a tensor gets more bytes than it has.
        """
        plan, frame = self._plan, self._plan.frame
        nbytes = plan.requests.nbytes
        for buffer, chunk in pieces:
            offset, filled = int(plan.offsets[buffer]), int(self._filled[buffer])
            end = filled + len(chunk)
            if end > nbytes[buffer]:
                raise SourceError(
                    f"the source delivered more than the {nbytes[buffer]} bytes that it announced for tensor "
                    f"{self._name(buffer)}"
                )
            if frame is not None:
                if not filled:
                    before = frame.before(buffer)
                    yield offset - len(before), before
                    self._crcs[buffer] = frame.crc_before(buffer)
                self._crcs[buffer] = _continued(int(self._crcs[buffer]), chunk)
            yield offset + filled, chunk
            self._filled[buffer] = end
            if frame is not None and end == nbytes[buffer]:
                yield offset + end, frame.after(buffer, int(self._crcs[buffer]))

    def tail(self) -> tuple[int, bytes]:
        """What ends the file, and where it begins.

        Raises: TruncatedSourceError when bytes are missing.
        """
        nbytes = self._plan.requests.nbytes
        short = np.flatnonzero(self._filled < nbytes)
        if len(short):
            buffer = int(short[0])
            raise TruncatedSourceError(
                f"the source ended after {self._filled[buffer]} of {nbytes[buffer]} bytes of tensor "
                f"{self._name(buffer)}"
            )
        frame = self._plan.frame
        tail = b"" if frame is None else frame.tail(self._crcs.tolist())
        return self._plan.nbytes - len(tail), tail

    def _name(self, buffer: int) -> str:
        return quoted(self._catalog.names[self._plan.rows[buffer]])


def _continued(crc: int, chunk: Chunk) -> int:
    if isinstance(chunk, Zeros):
        for part in zeros(chunk.nbytes):
            crc = crc32(part, crc)
        return crc
    return crc32(chunk, crc)
