"""A Llama checkpoint as Meta publishes it: ``consolidated.00.pth``, ``.01.pth`` ... and ``params.json``.

Every shard holds every name; how the shards make up a tensor follows from its name, and ``params.json`` proves it.

Source: fairscale's ColumnParallelLinear (its weight is cut along dim 0), RowParallelLinear (along dim 1) and
ParallelEmbedding (along dim 1) in llama/model.py of Llama 1 and 2, VocabParallelEmbedding (along dim 0) in that of 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stream_pack.catalog import Catalog, CatalogBuilder
from stream_pack.dtypes import BITS, DTYPES
from stream_pack.errors import StreamPackError, UnsupportedCheckpointError
from stream_pack.writer.sets.assembly import (
    Box,
    Part,
    Rows,
    assembled,
    part_chunk_nbytes,
    tiled,
    trimmed,
)
from stream_pack.writer.sets.composite import (
    OpenFile,
    listed,
    member_path,
    open_members,
    say_where,
    together,
)
from stream_pack.writer.source import Chunk, Piece, Requests, Source, StreamOptions

__all__ = ["PARAMS", "LlamaSource", "is_shard_name"]

PARAMS = "params.json"
MAX_PARAMS_NBYTES = 1 << 20

_SHARD = re.compile(r"consolidated\.(\d\d)\.pth")

_MERGED = {
    "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1,
}  # fmt: skip
"""The dim along which the shards of a weight follow each other, by the last word before ``.weight``."""
_EMBEDDINGS = "tok_embeddings"
_REPLICATED = {"attention_norm", "ffn_norm", "norm", "rope"}


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
        params = _read_params(member_path(folder, PARAMS, told_by="a Llama checkpoint"))
        paths = [member_path(folder, name, told_by="a Llama checkpoint") for name in names]
        self._names = names
        self._shards = open_members(paths, open_file)
        self._tensors: dict[int, _Merged] = {}
        try:
            self._catalog = self._build(params)
        except BaseException:
            self.close()
            raise

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def kind(self) -> str:
        return f"Llama set of {len(self._shards)} shards"

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(
            f"{name}: {remark}"
            for name, shard in zip(self._names, self._shards)
            for remark in shard.remarks
        )

    @property
    def spool_nbytes(self) -> int:
        return sum(shard.spool_nbytes for shard in self._shards)

    @property
    def verification(self) -> str:
        return together((shard.verification for shard in self._shards), of="shards")

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        wanted = [self._tensors[storage] for storage in requests.storages.tolist()]
        chunk_nbytes = part_chunk_nbytes(len(self._shards), options.chunk_nbytes)
        # One thread reads all shards; the writer's own threads overlap that with the rest.
        shard_options = replace(options, chunk_nbytes=chunk_nbytes, jobs=1, in_order=True)
        streams = [self._shard_chunks(k, wanted, shard_options) for k in range(len(self._shards))]
        parts = [Part(stream, what=name) for stream, name in zip(streams, self._names)]
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

    def _chunks(self, tensor: _Merged, parts: Sequence[Part], chunk_nbytes: int) -> Iterator[Chunk]:
        if tensor.plan is not None:
            return assembled(tensor.plan, parts, chunk_nbytes=chunk_nbytes)
        nbytes = int(self._shards[0].catalog.nbytes[tensor.rows[0]])
        return self._equal_chunks(tensor.name, nbytes, parts, chunk_nbytes)

    def _equal_chunks(
        self, name: str, nbytes: int, parts: Sequence[Part], chunk_nbytes: int
    ) -> Iterator[Chunk]:
        for begin in range(0, nbytes, chunk_nbytes):
            step = min(chunk_nbytes, nbytes - begin)
            first = parts[0].read(step)
            for shard, part in enumerate(parts[1:], 1):
                if part.read(step) != first:
                    raise UnsupportedCheckpointError(
                        f"tensor {name!r} should be the same in every shard, but {self._names[shard]} has other bytes "
                        f"than {self._names[0]} between {begin} and {begin + step}: the shards are of different "
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
            storages=shard.catalog.storages[rows],
            starts=shard.catalog.starts[rows],
            nbytes=shard.catalog.nbytes[rows],
        )
        pieces = shard.stream(requests, options)
        try:
            for _, chunk in pieces:
                yield chunk
        except StreamPackError as error:
            say_where(error, self._names[number])
            raise
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _build(self, params: _Params) -> Catalog:
        catalogs = [shard.catalog for shard in self._shards]
        rows = [{name: row for row, name in enumerate(c.names)} for c in catalogs]
        for shard, names in zip(self._names, rows):
            different = names.keys() ^ rows[0].keys()
            if different:
                raise UnsupportedCheckpointError(
                    f"{shard} and {self._names[0]} differ in the tensors {listed(sorted(different))}: the shards are "
                    "of different checkpoints"
                )
        builder = CatalogBuilder()
        known: dict[tuple[object, ...], int] = {}
        for name in catalogs[0].names:
            places = tuple(names[name] for names in rows)
            dtypes = {DTYPES[c.dtypes[row]].name for c, row in zip(catalogs, places)}
            if len(dtypes) > 1:
                raise UnsupportedCheckpointError(
                    f"tensor {name!r} has different dtypes in the shards: {', '.join(sorted(dtypes))}"
                )
            dtype = int(catalogs[0].dtypes[places[0]])
            shapes = [c.shape(row) for c, row in zip(catalogs, places)]
            dim = _merged_along(name, shapes, params)
            shape = _whole_shape(name, shapes, dim)
            params.check(name, shape)
            same = (
                dim,
                dtype,
                shape,
                *((int(c.storages[r]), int(c.starts[r])) for c, r in zip(catalogs, places)),
            )
            storage = known.setdefault(same, len(known))
            if storage not in self._tensors and 0 not in shape:
                plan = None if dim is None else _plan(name, shape, shapes, dim, BITS[dtype])
                self._tensors[storage] = _Merged(name, places, plan)
            builder.add(name, dtype, shape, storage=storage, start=0)
        storages_nbytes = sum(catalog.storages_nbytes for catalog in catalogs)
        return builder.build(storages_nbytes=storages_nbytes)


@dataclass(frozen=True, slots=True)
class _Params:
    """What params.json says of the whole tensors' shapes; 0 where it says nothing."""

    dim: int
    vocab: int
    query_rows: int
    key_rows: int

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises: UnsupportedCheckpointError where ``shape`` is not what params.json implies."""
        expected = {
            _EMBEDDINGS: (self.vocab, self.dim),
            "output": (self.vocab, self.dim),
            "wq": (self.query_rows, self.dim),
            "wk": (self.key_rows, self.dim),
            "wv": (self.key_rows, self.dim),
            "wo": (self.dim, self.query_rows),
            "w1": (0, self.dim),
            "w3": (0, self.dim),
            "w2": (self.dim, 0),
            "attention_norm": (self.dim,),
            "ffn_norm": (self.dim,),
            "norm": (self.dim,),
        }.get(_word(name))
        if expected is None:
            return
        if len(shape) != len(expected) or any(e not in (0, dim) for e, dim in zip(expected, shape)):
            wanted = ", ".join(str(e) if e else "any" for e in expected)
            raise UnsupportedCheckpointError(
                f"the shards of tensor {name!r} make up the shape {list(shape)}, and {PARAMS} says [{wanted}]: "
                "a shard is missing, or they are of different checkpoints"
            )


def _word(name: str) -> str:
    """What kind of weight it is: the last word but one, as in ``layers.0.attention.wq.weight``."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _merged_along(name: str, shapes: Sequence[tuple[int, ...]], params: _Params) -> int | None:
    """The dim along which the shards follow each other; None where each holds a copy."""
    word = _word(name)
    if len(shapes) == 1:
        return 0 if shapes[0] else None
    if word in _REPLICATED:
        return None
    dim = _MERGED.get(word)
    if word == _EMBEDDINGS and len(shapes[0]) == 2:
        # Llama 1 and 2 cut the embeddings along the model's dim, Llama 3 along the vocabulary.
        dim = 0 if shapes[0][1] == params.dim else 1
    if dim is None or any(len(shape) != 2 for shape in shapes):
        raise UnsupportedCheckpointError(
            f"how the shards of tensor {name!r}, of shape {list(shapes[0])}, make it up is not known: "
            "expected the tensors of Llama 1 to 3"
        )
    return dim


def _whole_shape(name: str, shapes: Sequence[tuple[int, ...]], dim: int | None) -> tuple[int, ...]:
    rest = {shape if dim is None else (*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise UnsupportedCheckpointError(
            f"the shards of tensor {name!r} have shapes that do not go together: {[list(s) for s in shapes]}"
        )
    if dim is None:
        return shapes[0]
    whole = sum(shape[dim] for shape in shapes)
    return (*shapes[0][:dim], whole, *shapes[0][dim + 1 :])


def _plan(
    name: str, shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]], dim: int, bits: int
) -> list[Rows]:
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
        raise UnsupportedCheckpointError(
            f"of the Llama shards {listed(shards)}, {listed(missing)} is missing"
        )
    return shards


def _read_params(path: Path) -> _Params:
    with open(path, "rb") as file:
        text = file.read(MAX_PARAMS_NBYTES + 1)
    try:
        params = json.loads(text[:MAX_PARAMS_NBYTES].decode())
    except (ValueError, RecursionError) as error:
        raise UnsupportedCheckpointError(f"{PARAMS} is not JSON: {error}") from None
    if not isinstance(params, dict):
        raise UnsupportedCheckpointError(f"{PARAMS} is not a JSON object")
    dim = _number(params, "dim")
    heads = _number(params, "n_heads")
    kv_heads = _number(params, "n_kv_heads") or heads
    if not dim or (heads and dim % heads and not params.get("head_dim")):
        raise UnsupportedCheckpointError(
            f"{PARAMS} has the dim {dim} and {heads} heads: expected the dim of a Llama model, a multiple of its heads"
        )
    head_dim = _number(params, "head_dim") or (dim // heads if heads else 0)
    return _Params(dim, _number(params, "vocab_size"), heads * head_dim, kv_heads * head_dim)


def _number(params: Mapping[str, object], key: str) -> int:
    """A count, 0 where there is none: Llama 1 and 2 write -1 for a vocabulary that the tokenizer knows."""
    value = params.get(key)
    if value is None or value == -1:
        return 0
    if type(value) is not int or not 0 < value < 2**31:
        raise UnsupportedCheckpointError(
            f"{PARAMS} has the {key} {str(value)[:40]}: expected a count"
        )
    return value
