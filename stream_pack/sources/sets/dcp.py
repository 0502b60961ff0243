"""A torch.distributed checkpoint: ``.metadata`` and ``*.distcp``, as ``torch.distributed.checkpoint.save`` writes them.

Each rank wrote the chunks that it held, each chunk as an archive of ``torch.save`` inside a ``.distcp`` file.  They are
read by the same one-pass reader as any checkpoint, and put where they belong.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Generator, Iterator
from dataclasses import replace
from pathlib import Path

from stream_pack.errors import (
    SourceError,
    StreamPackError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
)
from stream_pack.format.catalog import CatalogBuilder, tensor_nbytes
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.sniff import describe_start
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.source import Chunk, Piece, Requests, Source, StreamOptions, Traits
from stream_pack.sources.sets.assembly import (
    MIN_PART_CHUNK_NBYTES,
    Box,
    Part,
    Rows,
    assembled,
    part_chunk_nbytes,
    tiled,
    trimmed,
)
from stream_pack.sources.sets.composite import member_path, say_where, together
from stream_pack.sources.sets.dcp_metadata import Place, ShardedTensor, read_metadata
from stream_pack.sources.torch_save.globals import Storage, Tensor
from stream_pack.sources.torch_save.state_dict import Flatten, StateDict
from stream_pack.sources.torch_save.zip import TorchZipSource
from stream_pack.text import listed, quoted

__all__ = ["METADATA", "SHARD_SUFFIX", "DcpSource"]

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"
ZIP_ENTRY = b"PK\3\4"


class DcpSource(Source):
    """The whole tensors, in the order of the metadata.

    A training loop saves ``{"model": ..., "optimizer": ...}``: ``flatten`` chooses among the nested dicts, and names
    their tensors, just as in a checkpoint that is one file.  ``watch`` is asked about the metadata.

    Only the files' lengths are checked when it is made; a chunk is opened when its bytes are due.

    Raises: UnsupportedCheckpointError for metadata that contradicts itself or the files, chunks that do not hold every
    element once, what ``flatten`` refuses; UnsupportedTensorError; TruncatedSourceError; OSError.
    """

    def __init__(self, folder: Path, *, flatten: Flatten, watch: MemoryWatch) -> None:
        self._folder = folder
        found = read_metadata(folder / METADATA, watch=watch)
        chosen = flatten(_nested(found.tensors), ())
        remarks = list(chosen.remarks)
        if found.ignored:
            remarks.append(f"{found.ignored} entries that are no tensors were left out")
        unnamed = {name for name in os.listdir(folder) if name.endswith(SHARD_SUFFIX)} - found.files
        if unnamed:
            remarks.append(
                f"shards that {METADATA} does not name were left out, {len(unnamed)} in all, perhaps of another save: "
                f"{listed(sorted(unnamed))}"
            )
        self._tensors = [
            found.tensors[int(stand_in.storage.key)] for stand_in in chosen.tensors.values()
        ]
        self._verified: Counter[str] = Counter()
        _check_files(folder, self._tensors)
        builder = CatalogBuilder()
        nbytes = 0
        for tensor in self._tensors:
            # Refused now, not when its bytes are due.  The plan is not kept: all of them would take much memory.
            _plan(tensor)
        for storage, (name, tensor) in enumerate(zip(chosen.tensors, self._tensors)):
            shape = _logical(tensor.dtype, tensor.shape)
            nbytes += builder.add(name, tensor.dtype, shape, storage=storage, start=0)
        most = max((len(tensor.boxes) for tensor in self._tensors), default=0)
        traits = Traits(
            "torch.distributed checkpoint",
            held_nbytes=MIN_PART_CHUNK_NBYTES * most,
            remarks=tuple(remarks),
        )
        super().__init__(builder.build(storages_nbytes=nbytes), traits)

    @property
    def verification(self) -> str:
        if not self._verified:
            return "no chunk was read"
        return together(self._verified, of="chunks")

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        for buffer, (storage, start, nbytes) in enumerate(requests.rows()):
            chunks = self._whole(storage, options)
            for chunk in trimmed(chunks, start, start + nbytes):
                yield buffer, chunk

    def _whole(self, storage: int, options: StreamOptions) -> Iterator[Chunk]:
        tensor = self._tensors[storage]
        part_options = replace(
            options,
            chunk_nbytes=part_chunk_nbytes(len(tensor.boxes), options.chunk_nbytes),
            jobs=1,
            in_order=False,
        )
        streams = [
            self._chunk(tensor, box, place, part_options)
            for box, place in zip(tensor.boxes, tensor.places)
        ]
        parts = [
            Part(stream, what=f"a chunk of tensor {quoted(tensor.name)}") for stream in streams
        ]
        try:
            yield from assembled(_plan(tensor), parts, chunk_nbytes=options.chunk_nbytes)
            for stream in streams:
                for _ in stream:  # no bytes are left, but the archive's end has to be seen
                    pass
        finally:
            for stream in streams:
                stream.close()

    def _chunk(
        self, tensor: ShardedTensor, box: Box, place: Place, options: StreamOptions
    ) -> Generator[Chunk, None, None]:
        """The bytes of one chunk, whose archive is open only while they are read."""
        where = (
            f"{quoted(place.file)}, from byte {place.begin} on, the chunk of tensor {quoted(tensor.name)} at "
            f"{list(box.offsets)}"
        )
        try:
            with _opened(self._folder / place.file, place) as source:
                catalog = source.catalog
                shape, dtype = catalog.shape(0), int(catalog.dtypes[0])
                if shape != _logical(tensor.dtype, box.sizes) or dtype != tensor.dtype:
                    raise UnsupportedCheckpointError(
                        f"it is {DTYPES[dtype].name} of shape {list(shape)}, and {METADATA} says "
                        f"{DTYPES[tensor.dtype].name} of shape {list(box.sizes)}"
                    )
                requests = Requests(catalog.storages, catalog.starts, catalog.nbytes)
                for _, chunk in source.stream(requests, options):
                    yield chunk
                self._verified[source.verification] += 1
        except StreamPackError as error:
            say_where(error, where)
            raise


def _opened(path: Path, place: Place) -> TorchZipSource:
    stream = ByteStream.open_range(path, place.begin, place.nbytes)
    try:
        return TorchZipSource(stream, flatten=_one_tensor)
    except BaseException:
        stream.close()
        raise


def _one_tensor(value: object, unknown: Collection[str]) -> StateDict:
    if type(value) is not Tensor or unknown:
        names = f", and names {listed(unknown)}" if unknown else ""
        raise UnsupportedCheckpointError(f"the archive holds no plain tensor{names}")
    return StateDict({"": value}, 0)


def _nested(tensors: list[ShardedTensor]) -> dict[object, object]:
    """The dict that was saved, with stand-ins for its tensors: their storage's key is their place in the list."""
    root: dict[object, object] = {}
    for number, tensor in enumerate(tensors):
        node: object = root
        for step in tensor.path[:-1]:
            node = node.setdefault(step, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or tensor.path[-1] in node:
            raise UnsupportedCheckpointError(
                f"{METADATA} says that tensor {quoted(tensor.name)} was saved where another value was"
            )
        storage = Storage(str(number), 0, 0)
        node[tensor.path[-1]] = Tensor(storage, tensor.dtype, 0, tensor.shape, (), False, False)
    return root


def _plan(tensor: ShardedTensor) -> list[Rows]:
    if 0 in tensor.shape:
        if tensor.boxes:
            raise UnsupportedCheckpointError(
                f"{METADATA} says that tensor {quoted(tensor.name)} of shape {list(tensor.shape)} has no elements, and "
                f"lists {len(tensor.boxes)} chunks that hold some"
            )
        return []
    itemsize_bits = max(8, DTYPES[tensor.dtype].bits)  # a pair of 4-bit elements is one of torch's
    return tiled(tensor.name, tensor.shape, tensor.boxes, bits=itemsize_bits)


def _logical(dtype: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    if DTYPES[dtype].torch_pairs and shape:
        return (*shape[:-1], 2 * shape[-1])
    return shape


def _check_files(folder: Path, tensors: list[ShardedTensor]) -> None:
    """Every file is there and long enough, and begins its first chunk as an archive of torch.save."""
    first: dict[str, int] = {}
    end: dict[str, int] = {}
    for tensor in tensors:
        for box, place in zip(tensor.boxes, tensor.places):
            nbytes = tensor_nbytes(tensor.name, tensor.dtype, _logical(tensor.dtype, box.sizes))
            if nbytes > place.nbytes:
                raise UnsupportedCheckpointError(
                    f"the chunk of tensor {quoted(tensor.name)} at {list(box.offsets)} has {nbytes} bytes, and "
                    f"{METADATA} says that its archive in {quoted(place.file)} has {place.nbytes}"
                )
            first[place.file] = min(place.begin, first.get(place.file, place.begin))
            end[place.file] = max(place.begin + place.nbytes, end.get(place.file, 0))
    for file, begin in first.items():
        path = member_path(folder, file, told_by=METADATA)
        with open(path, "rb") as shard:
            nbytes = os.fstat(shard.fileno()).st_size
            if nbytes < end[file]:
                raise TruncatedSourceError(
                    f"{quoted(file)} has {nbytes} bytes, and {METADATA} places chunks up to byte {end[file]} in it: "
                    "it was cut short",
                    position=nbytes,
                    missing_nbytes=end[file] - nbytes,
                )
            shard.seek(begin)
            start = shard.read(512)
        if not start.startswith(ZIP_ENTRY):
            raise SourceError(
                f"{quoted(file)} has no archive of torch.save at byte {begin}, where its first chunk should be, but "
                f"{describe_start(start)}; a checkpoint saved in another format has to be consolidated first"
            )
