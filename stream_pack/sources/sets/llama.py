"""A Llama checkpoint as Meta publishes it: ``consolidated.00.pth``, ``.01.pth`` ... and ``params.json``.

Every shard holds every name; how the shards make up a tensor follows from its name, and ``params.json`` proves it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stream_pack.errors import SourceError, StreamPackError, UnsupportedCheckpointError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BITS, DTYPES
from stream_pack.pipeline.chunks import Chunk, Piece
from stream_pack.pipeline.file_state import FilesRead
from stream_pack.pipeline.places import Places
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.sources.sets.assembly import (
    MIN_PART_CHUNK_NBYTES,
    Box,
    PartStream,
    Rows,
    assembled,
    part_chunk_nbytes,
    tiled,
    trimmed,
)
from stream_pack.sources.sets.composite import (
    Member,
    OpenFile,
    member_path,
    member_remarks,
    member_warnings,
    open_members,
    say_where,
    together,
)
from stream_pack.sources.sets.llama_params import PARAMS, LlamaParams, merged_along, read_params
from stream_pack.text import counted, listed, quoted

__all__ = ["LlamaSource", "is_shard_name"]

_SHARD = re.compile(r"consolidated\.(\d\d)\.pth")


def is_shard_name(name: str) -> bool:
    """Whether a file of this name is one of the shards."""
    return _SHARD.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Merged:
    """One tensor: its row in each shard's catalog, and how they make it up; ``plan`` None: all are equal."""

    name: str
    rows: tuple[int, ...]
    plan: list[Rows] | None


class LlamaSource(Source):
    """The whole tensors, in the order of the first shard.

    All shards are read side by side, each in the order of the tensors: a chunk of each is held, and no tensor is ever
    whole in memory.  Tensors that every shard holds a copy of are compared as they pass.

    Raises: UnsupportedCheckpointError when a shard is missing, shards differ in names or dtypes, or their shapes do not
    add up to what params.json says; what ``open_file`` raises; OSError.
    """

    def __init__(self, folder: Path, *, open_file: OpenFile) -> None:
        names = _shard_names(entry.name for entry in folder.iterdir())
        self._files = FilesRead()
        params = read_params(member_path(folder, PARAMS, named_by="a Llama checkpoint"), self._files)
        paths = [member_path(folder, name, named_by="a Llama checkpoint") for name in names]
        self._names = names
        self._shards = open_members(paths, open_file)
        self._tensors: dict[int, _Merged] = {}
        try:
            self._check_shards()
            members = [Member(name, shard, ()) for name, shard in zip(names, self._shards)]
            traits = Traits(
                f"Llama set of {counted(len(names), 'shard')}",
                held_nbytes=sum(MIN_PART_CHUNK_NBYTES + shard.traits.held_nbytes for shard in self._shards),
                warnings=tuple(member_warnings(members)),
                remarks=tuple(member_remarks(members)),
            )
            super().__init__(self._build(params), traits)
        except BaseException:
            self.close()
            raise

    @property
    def verification(self) -> str:
        return together((shard.verification for shard in self._shards), of="shards")

    @property
    def checksums(self) -> str:
        return together((shard.checksums for shard in self._shards), of="shards")

    def places(self, requests: Requests) -> Places:
        """Of what the first shard has whole; each of the others has only a part, or a copy."""
        tensors = [self._tensors[storage] for storage in requests.storages.tolist()]
        whole = [k for k, tensor in enumerate(tensors) if tensor.plan is None or len(self._shards) == 1]
        catalog = self._shards[0].catalog
        rows = np.array([tensors[k].rows[0] for k in whole], np.int64)
        starts = catalog.starts[rows] + requests.starts[whole]
        found = self._shards[0].places(Requests(catalog.storages[rows], starts, requests.nbytes[whole]))
        none = Requests(*np.empty((3, 0), np.int64))
        nowhere: list[int] = []
        others = [(nowhere, shard.places(none)) for shard in self._shards[1:]]
        return Places.joined(len(requests), [(whole, found), *others])

    def check_unchanged(self) -> None:
        for shard in self._shards:
            shard.check_unchanged()
        self._files.check_unchanged()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        wanted = [self._tensors[storage] for storage in requests.storages.tolist()]
        chunk_nbytes = part_chunk_nbytes(len(self._shards), options.chunk_nbytes)
        # One thread reads all shards; the writer's own threads overlap that with the rest.
        shard_options = replace(options, chunk_nbytes=chunk_nbytes, jobs=1, in_order=True)
        streams = [self._shard_chunks(k, wanted, shard_options) for k in range(len(self._shards))]
        parts = [PartStream(stream, what=name) for stream, name in zip(streams, self._names)]
        try:
            ranges = zip(requests.starts.tolist(), requests.nbytes.tolist())
            for buffer, (tensor, (start, nbytes)) in enumerate(zip(wanted, ranges)):
                chunks = self._chunks(tensor, parts, options.chunk_nbytes)
                for chunk in trimmed(chunks, start, start + nbytes):
                    yield buffer, chunk
            for stream in streams:
                for _ in stream:  # what it still has to verify about itself
                    pass
        finally:
            for stream in streams:
                stream.close()

    def _chunks(self, tensor: _Merged, parts: Sequence[PartStream], chunk_nbytes: int) -> Iterator[Chunk]:
        if tensor.plan is not None:
            return assembled(tensor.plan, parts, chunk_nbytes=chunk_nbytes)
        nbytes = int(self._shards[0].catalog.nbytes[tensor.rows[0]])
        return self._equal_chunks(tensor.name, nbytes, parts, chunk_nbytes)

    def _equal_chunks(self, name: str, nbytes: int, parts: Sequence[PartStream], chunk_nbytes: int) -> Iterator[Chunk]:
        for begin in range(0, nbytes, chunk_nbytes):
            step = min(chunk_nbytes, nbytes - begin)
            first = parts[0].read(step)
            for shard, part in enumerate(parts[1:], 1):
                if part.read(step) != first:
                    raise UnsupportedCheckpointError(
                        f"tensor {quoted(name)} should be the same in every shard, but {self._names[shard]} has other "
                        f"bytes than {self._names[0]} between {begin} and {begin + step}: the shards are of different "
                        "checkpoints"
                    )
            yield first

    def _shard_chunks(
        self, number: int, wanted: Sequence[_Merged], options: StreamOptions
    ) -> Generator[Chunk, None, None]:
        """All bytes of the wanted tensors in one shard, one tensor after the other."""
        shard = self._shards[number]
        rows = np.array([tensor.rows[number] for tensor in wanted], np.int64)
        rows = rows[shard.catalog.nbytes[rows] > 0]
        requests = Requests(
            storages=shard.catalog.storages[rows], starts=shard.catalog.starts[rows], nbytes=shard.catalog.nbytes[rows]
        )
        pieces = shard.stream(requests, options)
        try:
            for _, chunk in pieces:
                yield chunk
        except StreamPackError as error:
            say_where(error, quoted(self._names[number]))
            raise
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _check_shards(self) -> None:
        for name, shard in zip(self._names, self._shards):
            if not shard.traits.chooses_order:
                raise UnsupportedCheckpointError(
                    f"{name} can only be read sequentially, so it cannot be merged with the other shards: repack the "
                    "archive without compression (zip -0)"
                )

    def _build(self, params: LlamaParams) -> Catalog:
        catalogs = [shard.catalog for shard in self._shards]
        rows = self._rows_by_name(catalogs)
        builder = CatalogBuilder()
        known: dict[tuple[object, ...], int] = {}
        for name in catalogs[0].names:
            places = tuple(names[name] for names in rows)
            try:
                dtype = _common_dtype(name, catalogs, places)
                shapes = [c.shape(row) for c, row in zip(catalogs, places)]
                dim = merged_along(name, shapes, params)
                shape = _whole_shape(name, shapes, dim)
                params.check(name, shape)
            except SourceError as error:
                builder.refuse(name, error)
                continue
            same = (dim, dtype, shape, *((int(c.storages[r]), int(c.starts[r])) for c, r in zip(catalogs, places)))
            storage = known.setdefault(same, len(known))
            if storage not in self._tensors and 0 not in shape:
                plan = None if dim is None else _plan(name, shape, shapes, dim, BITS[dtype])
                self._tensors[storage] = _Merged(name, places, plan)
                gathered = _gathered_from(catalogs, places)
                if gathered is not None:
                    # Of no storage that anything else is made of.
                    builder.derive(storage, of=len(catalogs[0]) + storage, begin=0, end=gathered)
            builder.add(name, dtype, shape, storage=storage, start=0)
        storages_nbytes = sum(catalog.storages_nbytes for catalog in catalogs)
        return builder.build(storages_nbytes=storages_nbytes)

    def _rows_by_name(self, catalogs: Sequence[Catalog]) -> list[dict[str, int]]:
        """The row of each tensor in each shard; all shards have the same tensors."""
        rows = [{name: row for row, name in enumerate(catalog.names)} for catalog in catalogs]
        for shard, names in zip(self._names, rows):
            different = names.keys() ^ rows[0].keys()
            if different:
                raise UnsupportedCheckpointError(
                    f"{shard} and {self._names[0]} differ in the tensors {listed(sorted(different))}: the shards are "
                    "of different checkpoints"
                )
        return rows


def _common_dtype(name: str, catalogs: Sequence[Catalog], rows: Sequence[int]) -> int:
    for catalog, row in zip(catalogs, rows):
        if row in catalog.refused:
            raise catalog.refused[row]
    dtypes = {int(catalog.dtypes[row]) for catalog, row in zip(catalogs, rows)}
    if len(dtypes) > 1:
        found = ", ".join(sorted(DTYPES[dtype].name for dtype in dtypes))
        raise UnsupportedCheckpointError(f"tensor {quoted(name)} has different dtypes in the shards: {found}")
    return dtypes.pop()


def _gathered_from(catalogs: Sequence[Catalog], rows: Sequence[int]) -> int | None:
    """How many bytes of the shards a tensor is made from; None if just those that it has."""
    nbytes, derived = 0, False
    for catalog, row in zip(catalogs, rows):
        made_from = catalog.derived.get(int(catalog.storages[row]))
        if made_from is None:
            nbytes += int(catalog.nbytes[row])
        else:
            _, begin, end = made_from
            nbytes += end - begin
            derived = True
    return nbytes if derived else None


def _whole_shape(name: str, shapes: Sequence[tuple[int, ...]], dim: int | None) -> tuple[int, ...]:
    rest = {shape if dim is None else (*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise UnsupportedCheckpointError(
            f"the shards of tensor {quoted(name)} have incompatible shapes: "
            f"{listed(map(str, map(list, shapes)), show=str)}"
        )
    if dim is None:
        return shapes[0]
    whole = sum(shape[dim] for shape in shapes)
    return (*shapes[0][:dim], whole, *shapes[0][dim + 1 :])


def _plan(name: str, shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]], dim: int, bits: int) -> list[Rows]:
    boxes, shards = [], []
    begin = 0
    for shard, part in enumerate(shapes):
        if part[dim]:
            offsets = tuple(begin if k == dim else 0 for k in range(len(shape)))
            boxes.append(Box(offsets, part))
            shards.append(shard)
            begin += part[dim]
    plan = tiled(name, shape, boxes, bits=bits)
    return [Rows(r.count, tuple((shards[box], nbytes) for box, nbytes in r.runs)) for r in plan]


def _shard_names(names: Iterable[str]) -> list[str]:
    """The shards in order, without a gap."""
    shards = sorted(name for name in names if is_shard_name(name))
    expected = [f"consolidated.{number:02}.pth" for number in range(len(shards))]
    missing = sorted(set(expected) - set(shards))
    if missing:
        raise UnsupportedCheckpointError(f"of the Llama shards {listed(shards)}, {listed(missing)} is missing")
    return shards
