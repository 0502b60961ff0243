"""Files as ExecuTorch writes them: surveyed, and raw payloads and data files also opened as if they were packs.

They have no checksums; payloads have no names either, and ExecuTorch writes some constants whose length is not that of
their dtype and dims.  So every position is bounded, and every constant that contradicts itself is marked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, NotAPackError, RawPayloadError
from stream_pack.et_files.constants import UNKNOWN, Constants
from stream_pack.et_files.survey import Survey, survey_payload, survey_program
from stream_pack.format.align import Alignment
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, sniff
from stream_pack.format.header import HeadKind
from stream_pack.format.index import NO_BUFFER, Index, name_columns, note_columns
from stream_pack.format.ranges import starts_apart
from stream_pack.reader.file_range import FileRange
from stream_pack.reader.lending import Contents
from stream_pack.reader.opening import read_head, read_header

__all__ = ["FileParts", "index_of", "read_payload", "survey_file"]


class FileParts:
    """A file range as :class:`stream_pack.et_files.payload.ReadFile`.  Copies: what is read."""

    def __init__(self, file: FileRange) -> None:
        self._file = file

    @property
    def nbytes(self) -> int:
        """The range's length."""
        return self._file.available

    def read(self, begin: int, nbytes: int) -> memoryview:
        """Bytes ``[begin, begin + nbytes)``, fewer at the end.  Raises: ReadError, TruncatedError."""
        return self._file.array(begin, max(0, min(nbytes, self.nbytes - begin))).data

    def keep(self, begin: int, end: int) -> None:
        """Does nothing: all of the file stays readable."""


def survey_file(file: FileRange) -> Survey | None:
    """What a program, a raw payload or a data file of ExecuTorch's holds; None for a pack.

    Raises: as :func:`stream_pack.reader.opening.read_head`; FormatError, TruncatedError for a file too damaged to be
    surveyed.
    """
    if sniff(file.read(0, SNIFF_NBYTES)) is Kind.PTE:
        return survey_program(FileParts(file))
    try:
        read_head(file)
    except RawPayloadError:
        return survey_payload(FileParts(file))
    return None


def read_payload(file: FileRange, kind: HeadKind) -> Contents:
    """The constants of a raw payload, named by the decimal numbers that the graph gives them, or those of a .ptd.

    Raises: NotAPackError, TruncatedError, FormatError.
    """
    header = read_header(file)
    if header.kind is not kind:
        raise NotAPackError(f"expected a payload of kind {kind.name!r}, found the header of {header.kind.name!r}")
    survey = survey_payload(FileParts(file))
    if survey.fatal_fault is not None:
        raise FormatError(survey.fatal_fault.text)
    (payload,) = survey.payloads
    constants = survey.constants
    region = payload.region_file_offset
    return Contents(
        head=None,
        checksum=None,
        index=index_of(constants, origin=region),
        region_file_offset=region,
        region_nbytes=payload.region_nbytes,
        nbytes=payload.nbytes,
        faults=constants.invalid,
        dim_orders=constants.orders,
    )


def index_of(constants: Constants, *, origin: int) -> Index:
    """The columns of an index.  Alignment may be anything, and lengths need not match dtype and dims.

    ``origin``: file offset of the region.
    """
    offsets, nbytes = constants.file_offsets - origin, constants.nbytes
    buffer_offsets, buffer_nbytes, buffers = _merge(offsets, nbytes)
    held = buffers != NO_BUFFER
    starts = np.zeros(len(offsets), np.int64)
    starts[held] = offsets[held] - buffer_offsets[buffers[held]]
    numbers, tensor_dtypes = np.unique(constants.dtypes, return_inverse=True)
    dtypes = [None if number == UNKNOWN else DTYPES[number] for number in numbers.tolist()]
    return Index(
        block_nbytes=BLOCK_NBYTES,
        alignment=Alignment(),
        dtype_names=tuple(dtype.name if dtype else "invalid" for dtype in dtypes),
        dtype_bits=np.array([dtype.bits if dtype else 8 for dtype in dtypes], np.uint16),
        buffer_offsets=buffer_offsets,
        buffer_nbytes=buffer_nbytes,
        tensor_buffers=buffers,
        tensor_starts=starts,
        tensor_dtypes=tensor_dtypes.astype(np.uint8),
        tensor_nbytes=nbytes,
        dims_ends=constants.dims.ends,
        dims=constants.dims.values,
        **name_columns(constants.names),
        **note_columns({}, [(row, *note) for row, notes in constants.notes.items() for note in notes.items()]),
    )


def _merge(
    offsets: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """Buffers that do not overlap, even if constants do: offsets, lengths, and the buffer of each constant."""
    buffers = np.full(len(offsets), NO_BUFFER, np.uint32)
    held = np.flatnonzero(nbytes > 0)
    order = held[np.argsort(offsets[held], kind="stable")]
    begins, ends = offsets[order], offsets[order] + nbytes[order]
    apart = starts_apart(begins, ends)
    buffers[order] = (np.cumsum(apart) - 1).astype(np.uint32)
    first = np.flatnonzero(apart)
    merged_ends = np.maximum.reduceat(ends, first) if len(first) else ends
    return begins[first], merged_ends - begins[first], buffers
