"""Data that is called by its own SHA-256 is compared with its name as it passes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from stream_pack.errors import SourceChecksumError
from stream_pack.et_files.digests import describe_digests, named_digests
from stream_pack.et_files.survey import Survey
from stream_pack.format.checksum import zeros
from stream_pack.pipeline.chunks import Piece, Zeros
from stream_pack.pipeline.source import Requests
from stream_pack.sources.executorch.catalog import FILE
from stream_pack.text import counted, quoted

__all__ = ["NamedData"]


class NamedData:
    """The data of a file whose names are digests.  ``checksums``: which constants those are, as a phrase.

    Whatever else a buffer has (several names that overlap, or a tensor gathered from another dim order) is not
    compared: only :mod:`stream_pack.reader.verify_et_file`, which has the whole file, can.
    """

    def __init__(self, survey: Survey) -> None:
        constants = survey.constants
        self._rows: dict[tuple[int, int], list[tuple[str, bytes]]] = {}
        digests = named_digests(survey)
        for row, digest in digests.items():
            place = constants.file_offsets.item(row), constants.nbytes.item(row)
            self._rows.setdefault(place, []).append((constants.names[row], digest))
        self.checksums = describe_digests(digests, survey)
        self._asked = self._verified = 0

    @property
    def verification(self) -> str:
        """What was compared, as a phrase; valid after :meth:`checked`."""
        if not self._verified:
            return "the source carries no checksum"
        if self._verified == self._asked:
            return "SHA-256 of all data verified"
        others = counted(self._asked - self._verified, "constant")
        return f"SHA-256 of {self._verified} data verified; {others} without a checksum"

    def checked(self, requests: Requests, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """``pieces``, compared on the way.  Raises: SourceChecksumError at the last piece of damaged data."""
        self._asked = len(requests)
        places = enumerate(requests.rows())
        left = {buffer: n for buffer, (of, start, n) in places if of == FILE and (start, n) in self._rows}
        states = {buffer: hashlib.sha256() for buffer in left}
        for buffer, chunk in pieces:
            if buffer in states:
                for part in zeros(chunk.nbytes) if isinstance(chunk, Zeros) else (chunk,):
                    states[buffer].update(part)
                left[buffer] -= len(chunk)
                if not left[buffer]:
                    place = requests.starts.item(buffer), requests.nbytes.item(buffer)
                    self._compare(place, states.pop(buffer).digest())
            yield buffer, chunk

    def _compare(self, place: tuple[int, int], actual: bytes) -> None:
        begin, nbytes = place
        for name, expected in self._rows[place]:
            if actual != expected:
                raise SourceChecksumError(
                    f"the data {quoted(name)} (bytes {begin} to {begin + nbytes}) have another SHA-256 than their "
                    f"name: {actual.hex()}; the source is damaged",
                    expected=int.from_bytes(expected, "big"),
                    actual=int.from_bytes(actual, "big"),
                )
        self._verified += 1
