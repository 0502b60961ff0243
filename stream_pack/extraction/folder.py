"""A folder as a target: safetensors files, the index of several, and what stood beside the source."""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import SourceError
from stream_pack.extraction.file_plan import FilePlan
from stream_pack.extraction.safetensors import plan_safetensors
from stream_pack.format.catalog import Catalog
from stream_pack.pipeline.source import Requests
from stream_pack.text import listed, quoted
from stream_pack.writer.sink import FileSink, Sink

__all__ = ["FolderPlan", "FolderSink", "plan_folder"]

STEM = "model"
INDEX = f"{STEM}.safetensors.index.json"
"""The names that transformers looks for.  Source: its utils/__init__.py, ``SAFE_WEIGHTS_NAME`` and its index."""

OTHER_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""What a loader might take instead of, or beside, the new files."""


@dataclass(frozen=True, slots=True, eq=False)
class FolderPlan:
    """``plan`` is that of all files as if they followed one another; file ``k`` is called ``names[k]`` and begins at
    ``begins[k]``.  ``index``: the text of the index of several files, None for one.
    """

    plan: FilePlan
    names: tuple[str, ...]
    begins: tuple[int, ...]
    index: str | None


def plan_folder(
    catalog: Catalog, rows: NDArray[np.int64], metadata: Mapping[str, str], *, max_shard_nbytes: int | None
) -> FolderPlan:
    """Files of at most ``max_shard_nbytes`` bytes of tensors, but for one tensor that is longer; None: one file.

    Raises: LimitError for a header that is longer than readers take.
    """
    groups = _groups(catalog.nbytes[rows].tolist(), max_shard_nbytes)
    plans = [plan_safetensors(catalog, rows[first:last], metadata) for first, last in groups]
    count = len(plans)
    names = [f"{STEM}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    names = names if count > 1 else [f"{STEM}.safetensors"]
    begins = np.cumsum([0, *(plan.nbytes for plan in plans)]).tolist()
    return FolderPlan(
        _together(plans, begins),
        tuple(names),
        tuple(begins[:-1]),
        _index(catalog, rows, groups, names) if count > 1 else None,
    )


def _groups(nbytes: Sequence[int], most: int | None) -> list[tuple[int, int]]:
    """Ranges of tensors for one file each; a file has one tensor at least."""
    groups = []
    first = total = 0
    for place, size in enumerate(nbytes):
        if most is not None and place > first and total + size > most:
            groups.append((first, place))
            first, total = place, 0
        total += size
    return [*groups, (first, len(nbytes))]


def _together(plans: Sequence[FilePlan], begins: Sequence[int]) -> FilePlan:
    """The files one after the other."""

    def column(name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(plan.requests, name) for plan in plans])

    return FilePlan(
        requests=Requests(column("storages"), column("starts"), column("nbytes")),
        rows=np.concatenate([plan.rows for plan in plans]),
        offsets=np.concatenate([plan.offsets + begin for plan, begin in zip(plans, begins)]),
        nbytes=begins[-1],
        head=tuple((begin + at, data) for plan, begin in zip(plans, begins) for at, data in plan.head),
    )


def _index(catalog: Catalog, rows: NDArray[np.int64], groups: Sequence[tuple[int, int]], names: Sequence[str]) -> str:
    weight_map = {
        catalog.names[row]: name for (first, last), name in zip(groups, names) for row in rows[first:last].tolist()
    }
    index = {"metadata": {"total_size": int(catalog.nbytes[rows].sum())}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class FolderSink(Sink):
    """Files in ``folder``, which is made if there is none, as one space of bytes.

    Each file appears whole, the index last, so that no loader finds half a set.  ``copied``: files to be copied there.

    Raises: SourceError where other weights are in ``folder`` that a loader might take instead; OSError.
    """

    in_order = False
    folder: str

    def __init__(self, folder: str, plan: FolderPlan, copied: Sequence[str]) -> None:
        super().__init__()
        self.folder = folder
        self._plan = plan
        self._copied = copied
        self._made = not os.path.isdir(folder)
        self._files: list[FileSink] = []
        if not self._made:
            _refuse_others(folder, plan)

    def begin(self, nbytes: int, *, reserve: bool) -> None:
        super().begin(nbytes, reserve=reserve)
        if self._made:
            os.mkdir(self.folder)
        ends = (*self._plan.begins[1:], nbytes)
        for name, begin, end in zip(self._plan.names, self._plan.begins, ends):
            file = FileSink(os.path.join(self.folder, name))
            self._files.append(file)
            file.begin(end - begin, reserve=reserve)
            self.warnings += file.warnings
            self.remarks += file.remarks if len(self._files) == 1 else ()

    def _write(self, position: int, parts: list[memoryview]) -> None:
        for part in parts:  # each is of one file
            number = bisect_right(self._plan.begins, position) - 1
            self._files[number].put(position - self._plan.begins[number], part)
            position += len(part)
        for file in self._files:
            file.flush()

    def commit(self) -> None:
        self.flush()
        for path in self._copied:
            _copy(path, self.folder)
        for file in self._files:
            file.commit()
        index = os.path.join(self.folder, INDEX)
        if self._plan.index is not None:
            text = self._plan.index.encode()
            with FileSink(index) as file:
                file.begin(len(text), reserve=True)
                file.put(0, text)
                file.commit()
        self._made = False

    def abort(self) -> None:
        self._parts = []
        for file in self._files:
            file.abort()
        if self._made:
            with suppress(OSError):  # it was not made, or somebody has put something there
                os.rmdir(self.folder)


def _copy(path: str, folder: str) -> None:
    target = os.path.join(folder, os.path.basename(path))
    if not (os.path.exists(target) and os.path.samefile(path, target)):
        shutil.copyfile(path, target)


def _refuse_others(folder: str, plan: FolderPlan) -> None:
    ours = {*plan.names, *([INDEX] if plan.index is not None else [])}
    others = sorted(name for name in os.listdir(folder) if name.endswith(OTHER_WEIGHTS) and name not in ours)
    if others:
        raise SourceError(
            f"the folder {quoted(folder)} holds other weights, {listed(others)}, which a loader might take instead of "
            "the new ones: choose another folder, or move them away"
        )
