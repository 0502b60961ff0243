"""Run by torchrun on two ranks, which write one pack together, each its own byte ranges of it.

Argument: the path of the pack.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import stream_pack

__all__ = ["BLOCK_NBYTES", "METADATA", "whole_model"]

BLOCK_NBYTES = 4096
METADATA = {"format": "pt"}


def whole_model() -> dict[str, torch.Tensor]:
    """Several blocks to a tensor, and ranges that begin and end inside of them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "rows": random(301, 70),
        "columns": random(9, 5001, dtype=torch.bfloat16),
        "of_rank_0": random(3000),
        "of_rank_1": random(3000, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "one_row": random(1, 8),  # nothing is left for rank 1
    }


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def write_mine(writer: stream_pack.PartWriter, rank: int) -> None:
    model = whole_model()
    for name in ("rows", "one_row"):  # Shard(0), uneven
        mine = model[name].chunk(2)[rank:][:1]
        before = model[name].chunk(2)[:rank]
        for shard in mine:
            writer.write(name, bytes_of(shard), begin=sum(part.nbytes for part in before))
    columns = model["columns"]  # Shard(1), uneven: a run in each row
    shard = columns.chunk(2, dim=1)[rank]
    first = rank * columns.chunk(2, dim=1)[0].shape[1]
    for row in reversed(range(len(columns))):
        begin = (row * columns.shape[1] + first) * columns.itemsize
        writer.write("columns", bytes_of(shard[row]), begin=begin)
    writer.write(f"of_rank_{rank}", bytes_of(model[f"of_rank_{rank}"]))
    if rank == 0:  # replicated: one of them writes it
        writer.write("scalar", bytes_of(model["scalar"].reshape(1)))


def main(path: str) -> None:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        told: list[object] = [None]
        if rank == 0:
            specs = {name: (t.dtype, tuple(t.shape)) for name, t in whole_model().items()}
            pack = stream_pack.ParallelWriter(path, specs, metadata=METADATA, block_nbytes=BLOCK_NBYTES)
            told = [pack.unfinished_path]
        dist.broadcast_object_list(told, src=0)
        with stream_pack.PartWriter(str(told[0])) as writer:
            write_mine(writer, rank)
            part = writer.finish()
        parts: list[stream_pack.Part] | None = [part] * 2 if rank == 0 else None
        dist.gather_object(part, parts, dst=0)
        if parts is not None:
            pack.commit(parts)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
