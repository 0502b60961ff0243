"""What the names of a Llama model and its ``params.json`` say of the tensors' shapes, and of how shards make them up.

Source: fairscale's ColumnParallelLinear (its weight is cut along dim 0), RowParallelLinear (along dim 1) and
ParallelEmbedding (along dim 1) in llama/model.py of Llama 1 and 2, VocabParallelEmbedding (along dim 0) in that of 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.pipeline.file_state import FilesRead
from stream_pack.sources.sets.composite import opened
from stream_pack.text import quoted, shown

__all__ = ["PARAMS", "LlamaParams", "merged_along", "read_params"]

PARAMS = "params.json"
MAX_PARAMS_NBYTES = 1 << 20

_MERGED = {
    "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1,
}  # fmt: skip
"""The dim along which the shards of a weight follow each other, by the last word before ``.weight``."""
_EMBEDDINGS = "tok_embeddings"
_REPLICATED = {"attention_norm", "ffn_norm", "norm", "rope"}


@dataclass(frozen=True, slots=True)
class LlamaParams:
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
                f"the shards of tensor {quoted(name)} make up the shape {list(shape)}, and {PARAMS} says [{wanted}]: "
                "a shard is missing, or they are of different checkpoints"
            )


def _word(name: str) -> str:
    """What kind of weight it is: the last word but one, as in ``layers.0.attention.wq.weight``."""
    return name.rpartition(".")[0].rpartition(".")[2]


def merged_along(name: str, shapes: Sequence[tuple[int, ...]], params: LlamaParams) -> int | None:
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
            f"cannot tell how to join the shards of tensor {quoted(name)} (shape {list(shapes[0])}): "
            "only Llama 1 to 3 is supported"
        )
    return dim


def read_params(path: Path, files: FilesRead) -> LlamaParams:
    with opened(path, files) as file:
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
    return LlamaParams(dim, _number(params, "vocab_size"), heads * head_dim, kv_heads * head_dim)


def _number(params: Mapping[str, object], key: str) -> int:
    """A count, 0 where there is none: Llama 1 and 2 write -1 for a vocabulary that the tokenizer knows."""
    value = params.get(key)
    if value is None or value == -1:
        return 0
    if type(value) is not int or not 0 < value < 2**31:
        raise UnsupportedCheckpointError(f"{PARAMS} has the {key} {shown(value)}: expected a count")
    return value
