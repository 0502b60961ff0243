"""``.metadata`` of a torch.distributed checkpoint: which tensors there are, and where their chunks are stored.

It is a plain pickle of dataclasses.  None of them is rebuilt (see
:class:`~stream_pack.pickles.unpickler.Opaque`): the values needed are taken from their states, nothing is
imported, and whatever else the pickle names is ignored.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py of torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.format.dtypes import BY_TORCH
from stream_pack.format.limits import MAX_NBYTES, MAX_RANK
from stream_pack.pickles.globals import TABLE, Unpackable, of_dtype
from stream_pack.pickles.unpickler import STEP_NBYTES, OddKey, Opaque, Unpickler, malformed
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.file_state import FilesRead
from stream_pack.sources.sets.assembly import Box
from stream_pack.sources.sets.composite import opened
from stream_pack.text import quoted

__all__ = ["METADATA", "Place", "ShardedTensor", "ShardedTensors", "read_metadata"]

METADATA = ".metadata"

REFORMULATED = "mcore_data"
ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"
"""Where Megatron notes the shape of a tensor that it has stored in another one."""

MAX_SHARDS = 100_000
"""Of one tensor: more than any job has ranks."""

_SUBCLASSES = {"megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": "Metadata"}
"""Classes of others that only add fields to one of torch's."""

ENTRY_NBYTES = 600
"""Memory that each tensor, and each chunk, takes beside what the pickle has become (measured with 200,000)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's archive is stored.  Units: bytes, ``begin`` from the file's start."""

    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor and the chunks that make it up; chunks without elements are left out.

    ``path`` holds the keys that lead to it in the nested dict that was saved.
    ``shape`` and the boxes count torch's elements (for ``float4_e2m1fn_x2``: pairs).  ``refused``: why no pack can hold
    it.
    ``shape`` and the boxes count torch's elements (for ``float4_e2m1fn_x2``: pairs).  ``original``: the tensor's own
    shape where Megatron has stored it in another one, see :mod:`stream_pack.sources.sets.dcp_reformulated`.
    """

    name: str
    path: tuple[str, ...]
    dtype: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    places: tuple[Place, ...]
    refused: Unpackable | None = None
    original: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """All tensors, in the order of the metadata; ``ignored``: the paths of the other entries.

    ``files``: every file that holds something.  ``unrestored``: names of tensors that are stored in another shape than
    their own, which cannot be found from it.
    """

    tensors: list[ShardedTensor]
    ignored: list[tuple[str, ...]]
    files: frozenset[str]
    unrestored: tuple[str, ...] = ()


def read_metadata(path: Path, files: FilesRead, *, watch: MemoryWatch) -> ShardedTensors:
    """Read ``.metadata``; of each tensor only the numbers' types and ranges are checked.

    Raises: UnsupportedCheckpointError, TruncatedSourceError, LimitError; OSError.
    """
    with opened(path, files) as file:
        unpickler = Unpickler(
            lambda: file.read(STEP_NBYTES), find_global=_find_global, find_persistent=_no_storage, watch=watch
        )
        value = unpickler.load()
        if unpickler.rest or file.read(1):
            raise malformed("bytes follow its end")
    metadata = _state(value, "Metadata")
    entries, data = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if type(entries) is not dict or type(data) is not dict:
        raise _unknown("it has no state_dict_metadata or no storage_data")
    watch.allow(ENTRY_NBYTES * (len(entries) + len(data)))
    places = _places(data)
    paths = metadata.get("planner_data")
    paths = paths if type(paths) is dict else {}
    reformulated = metadata.get(REFORMULATED)
    reformulated = reformulated if type(reformulated) is dict else {}
    tensors, unrestored, ignored = [], [], []
    for name, entry in entries.items():
        if type(name) is not str:
            raise _unknown("an entry whose name is not text")
        if _is(entry, "BytesStorageMetadata"):
            ignored.append(_path(name, paths))
            continue
        tensor = _tensor(name, _path(name, paths), entry, places)
        more = reformulated.get(name)
        if type(more) is dict and ORIGINAL_SHAPE in more:
            original = _original(tensor.shape, more[ORIGINAL_SHAPE])
            if original is None:
                unrestored.append(name)
                continue
            tensor = replace(tensor, original=original)
        tensors.append(tensor)
    files_named = frozenset(place.file for place in places.values())
    return ShardedTensors(tensors, ignored, files_named, tuple(unrestored))


def _find_global(name: str) -> object:
    return TABLE["torch.Size"] if name == "torch.Size" else Opaque(name)


def _no_storage(_identifier: object) -> object:
    raise malformed("a persistent id, in a pickle that has no storages")


def _tensor(
    name: str, path: tuple[str, ...], entry: object, places: Mapping[tuple[str, object], Place]
) -> ShardedTensor:
    fields = _state(entry, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not _is(properties, "TensorProperties"):
        raise _unknown(f"tensor {quoted(name)} has no TensorProperties")
    assert isinstance(properties, Opaque)
    state = properties.parts[-1]
    dtype = state[0] if type(state) is tuple and state else None
    dtype_name = dtype.name.removeprefix("torch.") if type(dtype) is Opaque else None
    if dtype_name is None:
        raise _unknown(f"tensor {quoted(name)} has no dtype")
    number = BY_TORCH.get(dtype_name)
    shape = _lengths(fields.get("size"), f"the size of tensor {quoted(name)}")
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise _unknown(f"tensor {quoted(name)} has no list of chunks")
    boxes, found = [], []
    for chunk in chunks:
        box_fields = _state(chunk, "ChunkStorageMetadata")
        what = f"a chunk of tensor {quoted(name)}"
        box = Box(_lengths(box_fields.get("offsets"), what), _lengths(box_fields.get("sizes"), what))
        if 0 in box.sizes:
            continue
        place = places.get((name, box.offsets))
        if place is None:
            raise _unknown(f"no place is given for the chunk of tensor {quoted(name)} at {list(box.offsets)}")
        boxes.append(box)
        found.append(place)
    refused = None if number is not None else of_dtype(dtype_name)
    return ShardedTensor(name, path, number or 0, shape, tuple(boxes), tuple(found), refused)


def _original(shape: tuple[int, ...], original: object) -> tuple[int, ...] | None:
    """The tensor's own shape, if ``shape`` is what Megatron makes of it: the number of shards along each dim, and the
    elements of one.
    """
    if (
        type(original) is not tuple
        or not all(type(dim) is int and dim >= 0 for dim in original)
        or len(original) + 1 != len(shape)
        or 0 in shape[:-1]
        or prod(shape[:-1]) > MAX_SHARDS
        or any(dim % count for dim, count in zip(original, shape))
        or prod(dim // count for dim, count in zip(original, shape)) != shape[-1]
    ):
        return None
    return original


def _places(data: dict[object, object]) -> dict[tuple[str, object], Place]:
    """Where each chunk is stored, by name and offsets (None for entries that are no tensors)."""
    places: dict[tuple[str, object], Place] = {}
    for key, value in data.items():
        index = _state(key.key if type(key) is OddKey else key, "MetadataIndex")
        info = _state(value, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        file, begin, nbytes = (info.get(field) for field in ("relative_path", "offset", "length"))
        if type(name) is not str or type(file) is not str:
            raise _unknown("a chunk whose name or file is not text")
        offsets = None if offset is None else _lengths(offset, f"the offsets of {quoted(name)}")
        begin, nbytes = _lengths((begin, nbytes), f"the place of {quoted(name)}")
        if info.get("transform_descriptors"):
            raise UnsupportedCheckpointError(
                f"the chunks of {quoted(name)} were transformed as they were saved (compressed?): save the checkpoint "
                "without stream transforms"
            )
        if (name, offsets) in places:
            raise _unknown(f"two places for the chunk of {quoted(name)} at {offsets}")
        places[name, offsets] = Place(file, begin, nbytes)
    return places


def _path(name: str, paths: Mapping[object, object]) -> tuple[str, ...]:
    path = paths.get(name)
    if type(path) is not tuple or not path or not all(type(p) in (str, int) for p in path):
        return (name,)
    return tuple(str(part) for part in path)


def _is(value: object, kind: str) -> bool:
    if type(value) is not Opaque:
        return False
    own = value.name.startswith("torch.distributed.") and value.name.endswith("." + kind)
    return own or _SUBCLASSES.get(value.name) == kind


def _state(value: object, kind: str) -> dict[object, object]:
    """The fields of a dataclass of torch.distributed."""
    if not _is(value, kind):
        found = quoted(value.name) if type(value) is Opaque else type(value).__name__
        raise _unknown(f"a {found} where a {kind} was expected")
    assert isinstance(value, Opaque)
    state = value.parts[-1] if value.parts else None
    if type(state) is not dict:
        raise _unknown(f"a {kind} without fields")
    return state


def _lengths(values: object, what: str) -> tuple[int, ...]:
    if (
        type(values) is not tuple
        or len(values) > MAX_RANK
        or not all(type(value) is int and 0 <= value <= MAX_NBYTES for value in values)
    ):
        raise _unknown(f"{what} is not made of whole numbers from 0 to {MAX_NBYTES}")
    return values


def _unknown(why: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"the .metadata is not that of a torch.distributed checkpoint on a file system, or damaged: {why}"
    )
