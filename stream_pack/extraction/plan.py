"""What is written of a source in which format, and what is lost by it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from stream_pack.extraction.file_plan import FilePlan
from stream_pack.extraction.folder import FolderPlan, plan_folder
from stream_pack.extraction.numpy import plan_npy, plan_npz
from stream_pack.extraction.options import ExtractOptions, Format
from stream_pack.extraction.raw import plan_raw
from stream_pack.extraction.report import ExtractedFile
from stream_pack.extraction.safetensors import DEFAULT_METADATA, ordered_rows, plan_safetensors, repeated_rows
from stream_pack.extraction.torch_zip import plan_torch
from stream_pack.format.catalog import Catalog
from stream_pack.format.layout import refuse_blowup
from stream_pack.pipeline.source import Source
from stream_pack.text import counted, listed
from stream_pack.writer.plan import allow_planning

__all__ = ["Planned", "plan_extraction", "told"]


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """``folder``: the plan of several files, of which ``file`` is the sum; None for one."""

    file: FilePlan
    folder: FolderPlan | None
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_extraction(taken: Source, form: Format, options: ExtractOptions, folder: str | None) -> Planned:
    """What is written where.  Raises: SourceError, LimitError."""
    catalog = taken.catalog
    allow_planning(catalog, options.common.max_memory)
    warnings = _lost(catalog, form)
    if form == "torch":
        return Planned(plan_torch(catalog, allow_blowup=options.common.allow_blowup), None, (), warnings)
    rows = np.arange(len(catalog))
    dropped: tuple[str, ...] = ()
    if form == "safetensors":
        if options.tied == "drop":
            repeated = repeated_rows(catalog)
            dropped = tuple(catalog.names[row] for row in np.flatnonzero(repeated).tolist())
            rows = rows[~repeated]
        rows = ordered_rows(catalog, rows)
    refuse_blowup(catalog, rows[catalog.nbytes[rows] > 0], allow_blowup=options.common.allow_blowup)
    if form == "safetensors":
        metadata = {**DEFAULT_METADATA, **catalog.metadata, **(options.common.metadata or {})}
        if folder is None:
            return Planned(plan_safetensors(catalog, rows, metadata), None, dropped, warnings)
        several_files = plan_folder(catalog, rows, metadata, max_shard_nbytes=options.max_shard_nbytes)
        return Planned(several_files.plan, several_files, dropped, warnings)
    planner = {"npy": plan_npy, "npz": plan_npz, "raw": plan_raw}[form]
    return Planned(planner(catalog), None, dropped, warnings)


def _lost(catalog: Catalog, form: Format) -> tuple[str, ...]:
    """What the source says of its tensors, and the format has no place for."""
    warnings = []
    if catalog.notes:
        rows = sorted({row for row, _, _ in catalog.notes})
        keys = sorted({key for _, key, _ in catalog.notes})
        warnings.append(
            f"{counted(len(rows), 'tensor')} ({listed(catalog.names[row] for row in rows)}) had notes, {listed(keys)}, "
            f"for which {form} has no place: what the bytes mean is lost"
        )
    texts = [key for key in catalog.metadata if key not in DEFAULT_METADATA]
    if texts and form != "safetensors":
        warnings.append(f"the metadata {listed(texts)} of the source has no place in {form}")
    return tuple(warnings)


class Told(TypedDict):
    source_kind: str
    to: str
    tensors: int
    nbytes: int
    files: tuple[ExtractedFile, ...]
    dropped: tuple[str, ...]


def told(taken: Source, form: Format, planned: Planned, target: object) -> Told:
    """What report and forecast say alike."""
    plan, folder = planned.file, planned.folder
    if folder is None:
        name = os.fsdecode(target) if isinstance(target, (str, os.PathLike)) else "-"
        files: tuple[ExtractedFile, ...] = (ExtractedFile(name, plan.nbytes),)
    else:
        ends = (*folder.begins[1:], plan.nbytes)
        files = tuple(ExtractedFile(name, end - begin) for name, begin, end in zip(folder.names, folder.begins, ends))
    return Told(
        source_kind=taken.traits.kind,
        to=form,
        tensors=len(taken.catalog) - len(planned.dropped),
        nbytes=plan.nbytes,
        files=files,
        dropped=planned.dropped,
    )
