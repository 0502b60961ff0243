"""Run by torchrun on two ranks: each saves its shards of one model with torch.distributed.checkpoint.

Arguments: the folder of the checkpoint, and a file for rank 0 to save the whole model to, as torch.save does.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

__all__ = ["whole_model"]


def whole_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "uneven_rows": random(7, 5),  # 4 rows and 3
        "columns": random(6, 10, dtype=torch.bfloat16),
        "uneven_columns": random(3, 5, 2, dtype=torch.bfloat16),  # 3 columns and 2
        "last_dim": random(2, 3, 9),
        "one_row": random(1, 8),  # nothing is left for rank 1
        "replicated": random(4, 4),
        "plain": torch.arange(6),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "empty_shards": torch.empty(4, 0),
        "transposed": random(5, 3).t(),
        "fp8": random(4, 4).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
    }


PLACEMENTS = {
    "uneven_rows": Shard(0),
    "columns": Shard(1),
    "uneven_columns": Shard(1),
    "last_dim": Shard(2),
    "one_row": Shard(0),
    "replicated": Replicate(),
    "empty_shards": Shard(0),
}


def main(folder: str, whole: str) -> None:
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = whole_model()
        state: dict[str, object] = {
            name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) if name in PLACEMENTS else tensor
            for name, tensor in model.items()
        }
        state["step"] = 7
        state["config"] = {"layers": [1, 2], "name": "x"}
        save(state, checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save(model, whole)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
