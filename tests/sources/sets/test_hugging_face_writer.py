"""Folders of torch's HuggingFaceStorageWriter: whole tensors are read, pieces of ranks are never taken for them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

import stream_pack
from stream_pack.errors import UnsupportedCheckpointError
from tests.support.documents import blocks_of

TENSORS = {"w": torch.arange(16.0).reshape(4, 4), "v": torch.arange(3.0), "s": torch.tensor(2.0)}


def written(folder: Path, mapping: dict[str, int] | None, *, distributed: bool = False) -> Path:
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=mapping, save_distributed=distributed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(TENSORS), storage_writer=writer, no_dist=True)
    return folder


def index_of(folder: Path) -> Path:
    (index,) = folder.glob("*.index.json")
    return index


@pytest.mark.parametrize("mapping", [None, {"w": 1, "v": 2, "s": 2}])
def test_whole_tensors_with_an_index_are_read(mapping: dict[str, int] | None, tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", mapping)
    with safetensors.safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        assert "DCP_SHARDING_INFO" in file.metadata()
    stream_pack.convert(folder, tmp_path / "pack")
    with stream_pack.open(tmp_path / "pack") as pack:
        assert {name: view.torch().tolist() for name, view in pack.items()} == {
            name: tensor.tolist() for name, tensor in TENSORS.items()
        }
        assert "DCP_SHARDING_INFO" not in pack.metadata  # which would make what is extracted look like pieces


@pytest.mark.parametrize("total_size", [None, 75, 77, "80", True])
def test_an_index_of_another_length_proves_nothing(total_size: object, tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", None)
    index = json.loads(index_of(folder).read_text())
    assert index["metadata"]["total_size"] == 4 * (16 + 3 + 1)
    index["metadata"]["total_size"] = total_size
    index_of(folder).write_text(json.dumps(index))
    refused(folder, tmp_path)


def refused(source: Path, folder: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"pieces .*consolidate_safetensors_files"):
        stream_pack.convert(source, folder / "pack")
    assert not (folder / "pack").exists()


def half(rows: slice, begin: object) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    told = {"w": {"saved_offsets": begin}}
    return {"w": TENSORS["w"][rows].clone()}, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(told)}


@pytest.mark.parametrize("begin", [[0, 1], [1, 0], [0], None, "00", [0, None, 0]])
def test_a_tensor_that_begins_elsewhere_is_a_piece_whatever_the_index_says(begin: object, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors, metadata = half(slice(0, 2), begin)
    safetensors.torch.save_file(tensors, folder / "a.safetensors", metadata)
    index = {"metadata": {"total_size": 32}, "weight_map": {"w": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"w": 3}', '{"v": {"saved_offsets": [0, 0]}}'])
def test_sharding_info_that_says_nothing_proves_nothing(text: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": TENSORS["w"]}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": text})
    refused(tmp_path / "a.safetensors", tmp_path)


def test_a_file_alone_is_not_proved_whole(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", {"w": 1, "v": 2, "s": 2})
    refused(next(folder.glob("*.safetensors")), tmp_path)


def test_the_pieces_of_ranks_are_refused_with_what_joins_them(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    for rank, rows in ((1, slice(0, 2)), (2, slice(2, 4))):
        tensors, metadata = half(rows, [rows.start, 0])
        safetensors.torch.save_file(tensors, folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors", metadata)
    refused(folder, tmp_path)
    (program,) = [block for block in blocks_of("docs/troubleshooting.md") if block.language == "python"]
    subprocess.run([sys.executable, "-c", program.text], cwd=tmp_path, check=True)
    stream_pack.convert(tmp_path / "joined", tmp_path / "pack")
    assert torch.equal(stream_pack.load_file(tmp_path / "pack")["w"], TENSORS["w"])


def test_what_one_rank_of_a_distributed_save_writes_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", None, distributed=True)
    assert [path.name.startswith("shard-") for path in folder.iterdir()] == [True]
    refused(folder, tmp_path)
