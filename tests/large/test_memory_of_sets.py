"""Converting a set of files, or a GGUF file, takes a few chunks of memory: measured on 1 GiB each."""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import mmap_ninja
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.memory import measure, needs_proc

MIB = 1 << 20
LIMIT = 80 * MIB

pytestmark = needs_proc


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(rows, columns, dtype=torch.int32).random_(generator=generator)


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.index.json").write_text(json.dumps({"weight_map": weight_map}))


def safetensors_shards(folder: Path) -> None:
    for number in range(4):
        tensors = {f"w{number}": random(64 << 10, 1024, number)}
        safetensors.torch.save_file(tensors, folder / f"{number}.safetensors")
    index(folder, {f"w{number}": f"{number}.safetensors" for number in range(4)})


def bin_shards(folder: Path) -> None:
    for number in range(4):
        torch.save({f"w{number}": random(64 << 10, 1024, number)}, folder / f"{number}.bin")
    index(folder, {f"w{number}": f"{number}.bin" for number in range(4)})


def llama_shards(folder: Path) -> None:
    """Eight shards of square weights, half of them cut along dim 0, half along dim 1, in runs of 4 KiB."""
    for number in range(8):
        tensors = {
            f"layers.{layer}.attention.{word}.weight": random(*shape, number)
            for layer in range(2)
            for word, shape in (("wq", (1024, 8192)), ("wo", (8192, 1024)))
        }
        torch.save(tensors, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text('{"dim": 8192, "n_heads": 64}')


def distributed(folder: Path) -> None:
    """One tensor of 1 GiB, as 64 ranks save it that each hold some of its columns (2 KiB a row)."""
    rows, columns, ranks = 8192, 512, 64
    state = {str(rank): random(rows, columns, rank) for rank in range(ranks)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = {int(key.fqn): place for key, place in metadata.storage_data.items()}
    entry = TensorStorageMetadata(
        metadata.state_dict_metadata["0"].properties,
        torch.Size([rows, columns * ranks]),
        [ChunkStorageMetadata(torch.Size([0, columns * rank]), torch.Size([rows, columns])) for rank in range(ranks)],
    )
    data = {MetadataIndex("w", (0, columns * rank)): place for rank, place in places.items()}
    whole = replace(metadata, state_dict_metadata={"w": entry}, storage_data=data, planner_data=None)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))


def ninja(folder: Path) -> None:
    mmap_ninja.np_from_ndarray(folder, random(256 << 10, 1024, 0).numpy())


def quantised(folder: Path) -> None:
    path, nbytes = folder / "model.gguf", (256 << 10) * 34 * 120
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_array("tokens", [f"token {number}" for number in range(100_000)])
    writer.add_tensor_info("w", (256 << 10, 34 * 120), np.dtype(np.uint8), nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + nbytes)


KINDS = [safetensors_shards, bin_shards, llama_shards, distributed, ninja, quantised]


@pytest.mark.parametrize("make", KINDS)
def test_a_gibibyte_stays_below_80_mib(make: Callable[[Path], None], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out.pack"
    source.mkdir()
    try:
        make(source)
        (single,) = list(source.glob("*.gguf")) or [source]
        argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", str(single), str(target)]
        peak = measure(argv).peak_anonymous_nbytes
        nbytes = target.stat().st_size
    finally:
        for path in sorted(tmp_path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert nbytes > 1000 * MIB
    assert peak < LIMIT, f"{peak / MIB:.1f} MiB"
