"""A torch.distributed checkpoint: ``.metadata`` and ``*.distcp``, as ``torch.distributed.checkpoint.save`` writes them.

Each rank wrote the chunks that it held, each chunk as an archive of ``torch.save`` inside a ``.distcp`` file.  They are
read by the same one-pass reader as any checkpoint, and put where they belong.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from stream_pack.errors import LimitError, SourceError, UnsupportedCheckpointError
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.pickles.globals import Storage, Tensor
from stream_pack.pickles.state_dict import Flatten
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.chunks import Chunk, Piece
from stream_pack.pipeline.file_state import FilesRead
from stream_pack.pipeline.places import NOWHERE, Places, SourceFile
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.sources.sets.assembly import (
    MIN_PART_CHUNK_NBYTES,
    PartStream,
    Rows,
    assembled,
    part_chunk_nbytes,
    trimmed,
)
from stream_pack.sources.sets.composite import together
from stream_pack.sources.sets.dcp_chunks import check_files, logical_shape, look_at_chunk, plan_chunks, read_chunk
from stream_pack.sources.sets.dcp_metadata import METADATA, ShardedTensor, ShardedTensors, read_metadata
from stream_pack.sources.sets.dcp_reformulated import Run, restored, shards_of
from stream_pack.text import counted, listed, quoted

__all__ = ["SHARD_SUFFIX", "DcpSource"]

SHARD_SUFFIX = ".distcp"


class DcpSource(Source):
    """The whole tensors, in the order of the metadata.

    A training loop saves ``{"model": ..., "optimizer": ...}``: ``flatten`` chooses among the nested dicts, and names
    their tensors, just as in a checkpoint that is one file.  ``watch`` is asked about the metadata.

    Only the files' lengths are checked when it is made; a chunk is opened when its bytes are due.

    A tensor whose chunks do not hold every element once, or whose dtype no pack has, is refused if it is taken.

    Raises: UnsupportedCheckpointError for metadata that contradicts itself or the files, what ``flatten`` refuses;
    TruncatedSourceError; OSError.
    """

    def __init__(self, folder: Path, *, flatten: Flatten, watch: MemoryWatch) -> None:
        self._folder = folder
        self._files = FilesRead()
        found = read_metadata(folder / METADATA, self._files, watch=watch)
        chosen = flatten(_nested(found), ())
        warnings = list(chosen.warnings)
        if found.unrestored:
            warnings.append(
                f"{counted(len(found.unrestored), 'tensor')} that Megatron has stored in another shape left out, "
                f"because the original shape cannot be restored: {listed(found.unrestored)}"
            )
        unnamed = {name for name in os.listdir(folder) if name.endswith(SHARD_SUFFIX)} - found.files
        if unnamed:
            warnings.append(
                f"shards that {METADATA} does not name were left out, {len(unnamed)} in all, perhaps of another save: "
                f"{listed(sorted(unnamed))}"
            )
        self._tensors = [found.tensors[int(stand_in.storage.key)] for stand_in in chosen.tensors.values()]
        self._verified: Counter[str] = Counter()
        check_files(folder, self._tensors, self._files)
        builder = CatalogBuilder()
        nbytes = 0
        for storage, (name, tensor) in enumerate(zip(chosen.tensors, self._tensors)):
            try:
                # Refused now, not when its bytes are due.  The plan is not kept: all of them would take much memory.
                _plan(tensor)
                shape = logical_shape(tensor.dtype, tensor.shape if tensor.original is None else tensor.original)
                nbytes += builder.add(name, tensor.dtype, shape, storage=storage, start=0)
            except (SourceError, LimitError) as error:
                builder.refuse(name, error)
        for name, reason in chosen.refused:
            builder.refuse(name, reason)
        most = max(map(_parts, self._tensors), default=0)
        traits = Traits(
            "torch.distributed checkpoint",
            held_nbytes=MIN_PART_CHUNK_NBYTES * most,
            warnings=tuple(warnings),
            remarks=chosen.remarks,
        )
        super().__init__(builder.build(storages_nbytes=nbytes), traits)

    @property
    def verification(self) -> str:
        if not self._verified:
            return "no chunk was read"
        return together(self._verified, of="chunks")

    @property
    def checksums(self) -> str:
        """Those of the first chunk: all are written in the same way."""
        tensor = next((tensor for tensor in self._tensors if tensor.places), None)
        return "none" if tensor is None else look_at_chunk(self._folder, tensor, tensor.places[0], self._files)[1]

    def places(self, requests: Requests) -> Places:
        """Of tensors that are one chunk; of others whose chunks are in one file, which."""
        known: dict[str, int] = {}
        found: dict[int, tuple[int, int]] = {}
        for storage in dict.fromkeys(requests.storages.tolist()):
            tensor = self._tensors[storage]
            files = [known.setdefault(place.file, len(known)) for place in tensor.places]
            offset = NOWHERE
            if len(files) == 1 and tensor.original is None:
                offset, _ = look_at_chunk(self._folder, tensor, tensor.places[0], self._files)
            found[storage] = (files[0] if len(set(files)) == 1 else NOWHERE, offset)
        rows = [found[storage] for storage in requests.storages.tolist()]
        numbers, offsets = np.array(rows, np.int64).reshape(-1, 2).T
        offsets = np.where(offsets == NOWHERE, NOWHERE, offsets + requests.starts)
        return Places(tuple(SourceFile(str(self._folder / name), None) for name in known), numbers, offsets)

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        for buffer, (storage, start, nbytes) in enumerate(requests.rows()):
            chunks = self._whole(storage, options)
            for chunk in trimmed(chunks, start, start + nbytes):
                yield buffer, chunk

    def _whole(self, storage: int, options: StreamOptions) -> Iterator[Chunk]:
        tensor = self._tensors[storage]
        part_options = replace(
            options, chunk_nbytes=part_chunk_nbytes(_parts(tensor), options.chunk_nbytes), jobs=1, in_order=False
        )
        plan, shards = _plan(tensor)
        if shards is None:
            streams = [self._chunk(tensor, number, part_options) for number in range(len(tensor.boxes))]
        else:
            streams = [self._shard(tensor, runs, part_options) for runs in shards]
        parts = [PartStream(stream, what=f"a chunk of tensor {quoted(tensor.name)}") for stream in streams]
        try:
            yield from assembled(plan, parts, chunk_nbytes=options.chunk_nbytes)
            for stream in streams:
                for _ in stream:  # no bytes are left, but the archive's end has to be seen
                    pass
        finally:
            for stream in streams:
                stream.close()

    def _chunk(self, tensor: ShardedTensor, number: int, options: StreamOptions) -> Generator[Chunk, None, None]:
        box, place = tensor.boxes[number], tensor.places[number]
        verification = yield from read_chunk(self._folder, tensor, box, place, self._files, options)
        self._verified[verification] += 1

    def _shard(self, tensor: ShardedTensor, runs: list[Run], options: StreamOptions) -> Generator[Chunk, None, None]:
        for number, begin, end in runs:
            with closing(self._chunk(tensor, number, options)) as chunks:
                yield from trimmed(chunks, begin, end)


def _plan(tensor: ShardedTensor) -> tuple[list[Rows], list[list[Run]] | None]:
    """How the parts of a tensor make it up: its chunks, or else shards, each of which is runs of chunks."""
    return (plan_chunks(tensor), None) if tensor.original is None else restored(tensor)


def _parts(tensor: ShardedTensor) -> int:
    return len(tensor.boxes) if tensor.original is None else shards_of(tensor)


def _nested(found: ShardedTensors) -> dict[object, object]:
    """The dict that was saved, with stand-ins for its tensors: their storage's key is their place in the list.

    What is no tensor is None there.
    """
    root: dict[object, object] = {}
    for number, tensor in enumerate(found.tensors):
        node: object = root
        for step in tensor.path[:-1]:
            node = node.setdefault(step, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or tensor.path[-1] in node:
            raise UnsupportedCheckpointError(
                f"{METADATA} says that tensor {quoted(tensor.name)} was saved where another value was"
            )
        storage = Storage(str(number), 0, 0)
        stand_in = Tensor(storage, tensor.dtype, 0, tensor.shape, (), False, False)
        node[tensor.path[-1]] = stand_in if tensor.refused is None else tensor.refused
    for path in found.ignored:
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault(path[-1], None)
    return root
