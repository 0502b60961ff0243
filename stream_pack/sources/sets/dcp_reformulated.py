"""Tensors that Megatron has stored in another shape, put back into their own.

Its optimizer holds ranges of flattened shards.  A tensor of shape ``[X, Y]``, cut into shards of shape ``[x, y]``, is
then saved as one of shape ``[X / x, Y / y, x * y]``: each shard as a row, flattened, so that ranks can save ranges of
it.  The attribute ``mcore_data`` of the metadata has the tensor's own shape.

Source: Megatron-LM, megatron/core/dist_checkpointing/strategies: resharding.py (``nd_flattened_tensor_reformulated_
global_shape``) and torch.py (``nd_reformulated_orig_global_shape``), core 0.6 to 0.14.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from stream_pack.format.dtypes import DTYPES
from stream_pack.sources.sets.assembly import Box, Rows, tiled
from stream_pack.sources.sets.dcp_metadata import ShardedTensor

__all__ = ["Run", "restored", "shards_of"]

Run = tuple[int, int, int]
"""(chunk, begin, end): bytes of one chunk."""


def shards_of(tensor: ShardedTensor) -> int:
    """How many shards a tensor was flattened from."""
    return prod(tensor.shape[:-1])


def restored(tensor: ShardedTensor) -> tuple[list[Rows], list[list[Run]]]:
    """The plan of the tensor in its own shape, whose parts are the shards, and the runs of chunks that are each shard.

    Raises: UnsupportedCheckpointError unless the chunks hold every element once.
    """
    assert tensor.original is not None
    if 0 in tensor.original:
        return [], []
    bits = max(8, DTYPES[tensor.dtype].bits)  # a pair of 4-bit elements is one of torch's
    tiled(tensor.name, tensor.shape, tensor.boxes, bits=bits)
    grid = tensor.shape[:-1]
    sizes = tuple(whole // count for whole, count in zip(tensor.original, grid))
    shards = list(product(*map(range, grid)))
    boxes = [Box(tuple(at * size for at, size in zip(shard, sizes)), sizes) for shard in shards]
    runs = _runs(tensor, {shard: number for number, shard in enumerate(shards)}, bits // 8)
    return tiled(tensor.name, tensor.original, boxes, bits=bits), runs


def _runs(tensor: ShardedTensor, numbers: Mapping[tuple[int, ...], int], itemsize: int) -> list[list[Run]]:
    """For each shard, where its bytes are, in their order."""
    found: list[list[tuple[int, Run]]] = [[] for _ in numbers]
    for chunk, box in enumerate(tensor.boxes):
        nbytes = box.sizes[-1] * itemsize
        spans = [range(begin, begin + size) for begin, size in zip(box.offsets[:-1], box.sizes[:-1])]
        for row, shard in enumerate(product(*spans)):
            found[numbers[shard]].append((box.offsets[-1], (chunk, row * nbytes, (row + 1) * nbytes)))
    return [[run for _, run in sorted(runs)] for runs in found]
