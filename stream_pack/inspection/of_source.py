"""What a source holds, and what a conversion would make of it: from its head alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import StreamPackError
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.inspection.inspection import (
    InspectedFile,
    InspectedPart,
    InspectedTensor,
    Inspection,
    RefusedTensor,
)
from stream_pack.inspection.rows import quantization_of, sharing
from stream_pack.pipeline.places import NOWHERE, Places, SourceFile
from stream_pack.pipeline.source import Requests, Source
from stream_pack.writer.forecast import forecast_pack
from stream_pack.writer.options import ConvertOptions

__all__ = ["inspect_source"]


def inspect_source(source: Source, path: str, *, offset: int) -> Inspection:
    """Inspect an open source.  ``offset``: where in its file it begins.

    Raises: SourceError; OSError.
    """
    catalog = source.catalog
    taken = np.array([row for row in range(len(catalog)) if row not in catalog.refused], np.int64)
    held = taken[catalog.nbytes[taken] > 0]
    places = source.places(Requests(catalog.storages[held], catalog.starts[held], catalog.nbytes[held]))
    files = tuple(_inspected(file, offset) for file in places.files)
    warnings, remarks, pack_nbytes, refusal = _conversion(source)
    return Inspection(
        path=path,
        kind=source.traits.kind,
        nbytes=sum(file.nbytes for file in files) if files else None,
        tensors_nbytes=int(catalog.nbytes[taken].sum()),
        metadata=dict(catalog.metadata),
        checksums=source.checksums,
        rows=tuple(_rows(source, taken, held, places, offset)),
        parts=tuple(_parts(places, catalog.nbytes[held], [file.nbytes for file in files], offset)),
        files=files,
        refused=tuple(
            RefusedTensor(catalog.names[row], type(error).__name__, str(error))
            for row, error in catalog.refused.items()
        ),
        refusal=refusal,
        pack_nbytes=pack_nbytes,
        warnings=warnings,
        remarks=remarks,
    )


def _inspected(file: SourceFile, offset: int) -> InspectedFile:
    status = os.stat(file.path or "") if file.descriptor is None else os.fstat(file.descriptor)
    return InspectedFile(os.path.basename(file.path or ""), max(0, status.st_size - offset))


def _conversion(source: Source) -> tuple[tuple[str, ...], tuple[str, ...], int | None, str | None]:
    """What :func:`stream_pack.convert` says by default: its warnings and remarks, the pack's length or an error."""
    try:
        forecast = forecast_pack(source, ConvertOptions().settings, to_stream=False)
    except StreamPackError as error:
        return source.traits.warnings, source.traits.remarks, None, str(error)
    return forecast.warnings, forecast.remarks, forecast.target_nbytes, None


def _rows(
    source: Source, taken: NDArray[np.int64], held: NDArray[np.int64], places: Places, offset: int
) -> Iterator[InspectedTensor]:
    """A row for each tensor of ``taken``; ``places``: of those of them that have bytes, ``held``."""
    catalog = source.catalog
    buffers, files, offsets = (np.full(len(catalog), NOWHERE, np.int64) for _ in range(3))
    buffers[held], files[held], offsets[held] = catalog.storages[held], places.numbers, places.offsets
    # Among the rows that are listed: a number is a place in their list.
    inside, same = sharing(buffers[taken], catalog.starts[taken], catalog.nbytes[taken])
    notes: dict[int, dict[str, str]] = {}
    for row, key, value in catalog.notes:
        notes.setdefault(row, {})[key] = value
    names = [os.path.basename(file.path or "") for file in places.files] if len(places.files) > 1 else []
    columns = (taken, catalog.dtypes[taken], catalog.nbytes[taken], buffers[taken], files[taken], offsets[taken])
    for number, (row, dtype, nbytes, buffer, file, begin) in enumerate(zip(*(column.tolist() for column in columns))):
        noted = notes.get(row, {})
        yield InspectedTensor(
            number=number,
            name=catalog.names[row],
            dtype=DTYPES[dtype].name,
            shape=catalog.shape(row),
            nbytes=nbytes,
            file=names[file] if names and file != NOWHERE else None,
            file_offset=None if begin == NOWHERE else begin - offset,
            buffer=None if buffer == NOWHERE else buffer,
            shared_with=same.get(number),
            inside=inside.get(number),
            page_aligned=False,
            fault=None,
            dim_order=None,
            quantization=quantization_of(noted),
            notes=noted,
        )


def _parts(
    places: Places, lengths: NDArray[np.int64], files_nbytes: Sequence[int], offset: int
) -> Iterator[InspectedPart]:
    """What fills the files, if every tensor lies in one of them as it is."""
    if not len(lengths) or np.any(places.offsets == NOWHERE):
        return
    before = tensors = between = after = 0
    for number, nbytes in enumerate(files_nbytes):
        begins = places.offsets[places.numbers == number] - offset
        ends = begins + lengths[places.numbers == number]
        if not len(begins):
            before += nbytes
            continue
        order = np.argsort(begins, kind="stable")
        stored = int(fresh_nbytes(begins[order], ends[order]).sum())
        first, last = int(begins.min()), int(ends.max())
        before += first
        tensors += stored
        between += last - first - stored
        after += nbytes - last
    yield InspectedPart("before the tensors", before)
    yield InspectedPart("tensors", tensors)
    yield InspectedPart("between the tensors", between)
    yield InspectedPart("after the tensors", after)
