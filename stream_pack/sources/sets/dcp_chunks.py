"""What a chunk of a torch.distributed checkpoint must satisfy, where it is, and its bytes.

Before a byte is read: its file is there, long enough, and starts as an archive of ``torch.save``
(:func:`check_files`); with the others it holds every element of its tensor once (:func:`plan_chunks`).  When its bytes
are due: the archive holds one plain tensor of the dtype and shape that the metadata gives it (:func:`read_chunk`).
What the metadata itself must satisfy is in :mod:`stream_pack.sources.sets.dcp_metadata`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator
from functools import partial
from pathlib import Path

from stream_pack.errors import SourceError, StreamPackError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.format.catalog import tensor_nbytes
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.file_kinds import describe_start
from stream_pack.pickles.globals import Tensor
from stream_pack.pickles.state_dict import StateDict
from stream_pack.pipeline.bytestream import READ_AHEAD_NBYTES, ByteStream
from stream_pack.pipeline.chunks import Chunk
from stream_pack.pipeline.file_state import FilesRead
from stream_pack.pipeline.places import NOWHERE
from stream_pack.pipeline.source import Requests, StreamOptions
from stream_pack.sources.sets.assembly import Box, Rows, tiled
from stream_pack.sources.sets.composite import member_path, opened, say_where
from stream_pack.sources.sets.dcp_metadata import METADATA, Place, ShardedTensor
from stream_pack.sources.torch_save.zip import TorchZipSource
from stream_pack.text import listed, quoted

__all__ = ["check_files", "logical_shape", "look_at_chunk", "plan_chunks", "read_chunk"]

ZIP_ENTRY = b"PK\3\4"
HEAD_NBYTES = 1024
"""What is read at once where only the head of a chunk's archive is wanted: it has about as many."""


def check_files(folder: Path, tensors: list[ShardedTensor], files: FilesRead) -> None:
    """Every file is there and long enough, and begins its first chunk as an archive of torch.save."""
    first: dict[str, int] = {}
    end: dict[str, int] = {}
    for tensor in tensors:
        for box, place in zip(tensor.boxes, tensor.places):
            nbytes = tensor_nbytes(tensor.name, tensor.dtype, logical_shape(tensor.dtype, box.sizes))
            if nbytes > place.nbytes:
                raise UnsupportedCheckpointError(
                    f"the chunk of tensor {quoted(tensor.name)} at {list(box.offsets)} has {nbytes} bytes, and "
                    f"{METADATA} says that its archive in {quoted(place.file)} has {place.nbytes}"
                )
            first[place.file] = min(place.begin, first.get(place.file, place.begin))
            end[place.file] = max(place.begin + place.nbytes, end.get(place.file, 0))
    for file, begin in first.items():
        path = member_path(folder, file, named_by=METADATA)
        with opened(path, files) as shard:
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


def plan_chunks(tensor: ShardedTensor) -> list[Rows]:
    """In which order rows of the chunks make the tensor.

    Raises: UnsupportedCheckpointError unless they hold every element once.
    """
    if 0 in tensor.shape:
        if tensor.boxes:
            raise UnsupportedCheckpointError(
                f"{METADATA} says that tensor {quoted(tensor.name)} of shape {list(tensor.shape)} has no elements, and "
                f"lists {len(tensor.boxes)} chunks that hold some"
            )
        return []
    itemsize_bits = max(8, DTYPES[tensor.dtype].bits)  # a pair of 4-bit elements is one of torch's
    return tiled(tensor.name, tensor.shape, tensor.boxes, bits=itemsize_bits)


def logical_shape(dtype: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in elements: torch counts a pair of 4-bit ones as one."""
    if DTYPES[dtype].torch_pairs and shape:
        return (*shape[:-1], 2 * shape[-1])
    return shape


def read_chunk(
    folder: Path, tensor: ShardedTensor, box: Box, place: Place, files: FilesRead, options: StreamOptions
) -> Generator[Chunk, None, str]:
    """The bytes of one chunk, whose archive is open only while they are read.  Returns what of it was verified.

    ``files`` knows the state that :func:`check_files` found each file in.

    Raises: UnsupportedCheckpointError where the archive is not the chunk that the metadata describes;
    SourceChangedError; SourceError.
    """
    where = (
        f"{quoted(place.file)}, from byte {place.begin} on, the chunk of tensor {quoted(tensor.name)} at "
        f"{list(box.offsets)}"
    )
    try:
        with _opened(folder / place.file, tensor, place, files) as source:
            catalog = source.catalog
            shape, dtype = catalog.shape(0), int(catalog.dtypes[0])
            if shape != logical_shape(tensor.dtype, box.sizes) or dtype != tensor.dtype:
                raise UnsupportedCheckpointError(
                    f"it is {DTYPES[dtype].name} of shape {list(shape)}, and {METADATA} says "
                    f"{DTYPES[tensor.dtype].name} of shape {list(box.sizes)}"
                )
            requests = Requests(catalog.storages, catalog.starts, catalog.nbytes)
            for _, chunk in source.stream(requests, options):
                yield chunk
            source.check_unchanged()
            return source.verification
    except StreamPackError as error:
        say_where(error, where)
        raise


def look_at_chunk(folder: Path, tensor: ShardedTensor, place: Place, files: FilesRead) -> tuple[int, str]:
    """The file offset of the bytes of a chunk, NOWHERE if they are not stored there as they are; and which checksums
    its archive carries.  None of its bytes is read.

    Raises: as :func:`read_chunk`.
    """
    try:
        with _opened(folder / place.file, tensor, place, files, read_ahead_nbytes=HEAD_NBYTES) as source:
            catalog = source.catalog
            if not catalog.nbytes.any():
                return NOWHERE, source.checksums
            places = source.places(Requests(catalog.storages, catalog.starts, catalog.nbytes))
            return int(places.offsets[0]), source.checksums
    except StreamPackError as error:
        say_where(error, f"{quoted(place.file)}, from byte {place.begin} on")
        raise


def _opened(
    path: Path, tensor: ShardedTensor, place: Place, files: FilesRead, *, read_ahead_nbytes: int = READ_AHEAD_NBYTES
) -> TorchZipSource:
    stream = ByteStream.open_range(path, place.begin, place.nbytes)
    stream.read_ahead_nbytes = read_ahead_nbytes
    try:
        assert stream.opened_state is not None  # it is a regular file
        files.see(path, stream.opened_state)
        return TorchZipSource(stream, flatten=partial(_one_tensor, tensor.name))
    except BaseException:
        stream.close()
        raise


def _one_tensor(name: str, value: object, unknown: Collection[str]) -> StateDict:
    if type(value) is not Tensor or unknown:
        names = f", and names {listed(unknown)}" if unknown else ""
        raise UnsupportedCheckpointError(f"the archive holds no plain tensor{names}")
    return StateDict({name: value}, 0)
