"""What fills a file that ExecuTorch wrote, to its last byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from stream_pack.et_files.digests import describe_digests, named_digests
from stream_pack.et_files.payload import Payload
from stream_pack.et_files.survey import Survey
from stream_pack.inspection.inspection import InspectedPart, InspectedPayload, Inspection
from stream_pack.inspection.rows import rows_of
from stream_pack.reader.file_range import FileRange
from stream_pack.reader.opening import naming
from stream_pack.reader.payload import index_of, survey_file

__all__ = ["inspect_et_file"]


def inspect_et_file(path: str | os.PathLike[str], *, offset: int, nbytes: int | None) -> Inspection | None:
    """Inspect a program, raw payload or data file; None for a pack.

    Raises: OSError; as :func:`stream_pack.reader.payload.survey_file`.
    """
    with closing(FileRange(path, offset=offset, nbytes=nbytes)) as file, naming(file):
        survey = survey_file(file)
    return None if survey is None else _inspection(survey, file)


def _inspection(survey: Survey, file: FileRange) -> Inspection:
    index = index_of(survey.constants, origin=0)
    return Inspection(
        path=file.path,
        kind=survey.kind,
        nbytes=file.available,
        tensors_nbytes=int(survey.constants.nbytes.sum()),
        metadata={},
        checksums=describe_digests(named_digests(survey), survey),
        rows=tuple(rows_of(index, 0, survey.constants.invalid, survey.constants.orders)),
        parts=tuple(_parts(survey, file.available)),
        payloads=tuple(_payload_row(payload) for payload in survey.payloads if payload.users),
        external=survey.external,
        faults=tuple(
            fault.text
            for fault in survey.faults
            if not (fault.fatal and fault.part == "constant")  # which is in the row
        ),
    )


def _payload_row(payload: Payload) -> InspectedPayload:
    return InspectedPayload(
        name=payload.users[0],
        backend=payload.backend,
        kind=payload.kind,
        file_offset=payload.file_offset,
        nbytes=payload.nbytes,
        constants=len(payload.constants),
        keyed=tuple(payload.keyed),
        also_used_by=payload.users[1:],
    )


PADDING, TRAILING = "padding", "trailing bytes"


def _parts(survey: Survey, nbytes: int) -> Iterator[InspectedPart]:
    """Every byte counts once: for a constant, else for the first span that has it, else as padding."""
    begins = survey.constants.file_offsets
    ends = begins + survey.constants.nbytes
    ranges = {}
    row = 0
    for name, count in survey.groups:
        ranges[name] = (begins[row : row + count], ends[row : row + count])
        row += count
    for name in dict.fromkeys(span.name for span in survey.spans):
        spans = [span for span in survey.spans if span.name == name]
        ranges[name] = (
            np.array([span.file_begin for span in spans], np.int64),
            np.array([span.file_end for span in spans], np.int64),
        )
    end = min(survey.file_end, nbytes)
    ranges[PADDING] = np.array([0]), np.array([end])
    ranges[TRAILING] = np.array([0]), np.array([nbytes])
    bounds = np.unique(np.concatenate([column for pair in ranges.values() for column in pair]))
    bounds = bounds[bounds <= nbytes]
    widths = np.diff(bounds)
    counted = np.zeros(len(widths), bool)
    for name, (first, last) in ranges.items():
        depth = np.zeros(len(bounds) + 1, np.int64)
        np.add.at(depth, np.searchsorted(bounds, np.minimum(first, nbytes)), 1)
        np.add.at(depth, np.searchsorted(bounds, np.minimum(last, nbytes)), -1)
        covered = (np.cumsum(depth)[: len(widths)] > 0) & ~counted
        counted |= covered
        total = int(widths[covered].sum())
        if total:
            yield InspectedPart(name, total)
