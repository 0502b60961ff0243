"""Files that ExecuTorch wrote: none of them is a pack, some contain packs."""

from __future__ import annotations

from stream_pack.errors import RawPayloadError
from stream_pack.et_files.survey import Survey, survey_payload, survey_program
from stream_pack.format.sniff import SNIFF_NBYTES, Kind, sniff
from stream_pack.reader.mapping import FileRange
from stream_pack.reader.opening import read_head
from stream_pack.reader.payload import MappedFile

__all__ = ["survey_file"]


def survey_file(file: FileRange) -> Survey | None:
    """What a program, a raw payload or a data file of ExecuTorch's holds; None for a pack.

    Raises: as :func:`stream_pack.reader.opening.read_head`; FormatError, TruncatedError for a file too damaged to be
    surveyed.
    """
    if sniff(file.read(0, SNIFF_NBYTES)) is Kind.PTE:
        return survey_program(MappedFile(file))
    try:
        read_head(file)
    except RawPayloadError:
        return survey_payload(MappedFile(file))
    return None
