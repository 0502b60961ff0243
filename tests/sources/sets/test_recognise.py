"""Which set a folder is, told by what it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mmap_ninja
import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack.errors import UnsupportedCheckpointError
from tests.sources.sets import test_dcp

W = torch.arange(16.0).reshape(4, 4)


def hugging_face(folder: Path) -> None:
    safetensors.torch.save_file({"norm.weight": W[0].clone()}, folder / "model.safetensors")
    index = {"weight_map": {"norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def llama(folder: Path) -> None:
    for number in range(2):
        torch.save({"norm.weight": W[0].clone()}, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text('{"dim": 4}')


def distributed(folder: Path) -> None:
    test_dcp.save({"norm.weight": W[0].clone()}, folder)


def ninja(folder: Path) -> None:
    mmap_ninja.np_from_ndarray(folder, W[0].numpy())


KINDS = [hugging_face, llama, distributed, ninja]
Make = Callable[[Path], None]


@pytest.mark.parametrize("make", KINDS)
def test_a_folder_is_what_it_holds(make: Make, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "tokenizer.json").write_text("{}")
    make(tmp_path)
    target = tmp_path / "out.pack"
    stream_pack.convert(tmp_path, target)
    with stream_pack.open(target) as pack:
        (name,) = pack
        assert torch.equal(pack[name].torch(), W[0])


@pytest.mark.parametrize("make", KINDS)
def test_converting_a_folder_loads_neither_torch_nor_safetensors(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    program = (
        "import sys, stream_pack\n"
        "stream_pack.convert(sys.argv[1], sys.argv[2])\n"
        "print({'torch', 'safetensors', 'pickle'} & {name.partition('.')[0] for name in sys.modules} - before)"
    )
    before = "import sys, numpy, mmap_ninja\nbefore = set(sys.modules)\n"
    argv = [sys.executable, "-c", before + program, str(tmp_path), str(tmp_path / "out.pack")]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_folder_that_is_two_sets_is_refused(first: Make, second: Make, tmp_path: Path) -> None:
    if first is second:
        return
    first(tmp_path)
    second(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="holds 2 checkpoints"):
        stream_pack.convert(tmp_path, tmp_path / "out.pack")


def test_of_two_indexes_the_one_that_is_named_is_taken(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    other = tmp_path / "model.safetensors.index.fp16.json"
    other.write_text((tmp_path / "model.safetensors.index.json").read_text())
    with pytest.raises(UnsupportedCheckpointError, match=r"index\.fp16\.json', the index 'model"):
        stream_pack.convert(tmp_path, tmp_path / "out.pack")
    stream_pack.convert(other, tmp_path / "out.pack")
    assert (tmp_path / "out.pack").exists()


def test_an_unknown_folder_says_what_was_looked_for_and_what_it_has_instead(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError) as caught:
        stream_pack.convert(tmp_path, tmp_path / "out.pack")
    for looked_for in ("index.json", "consolidated.NN.pth", "params.json", ".metadata", ".distcp", "type.ninja"):
        assert looked_for in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpointError, match=r"it holds 'model\.safetensors': pass the path of a file"):
        stream_pack.convert(tmp_path, tmp_path / "out.pack")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (ninja, "type.ninja"),
        (ninja, "shape.ninja"),
        (distributed, ".metadata"),
        (hugging_face, "model.safetensors.index.json"),
        (llama, "params.json"),
    ],
)
def test_a_fifo_in_the_place_of_a_file_is_refused_and_not_waited_for(make: Make, name: str, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UnsupportedCheckpointError, match=rf"{name}.*not a regular file"):
        stream_pack.convert(tmp_path, tmp_path / "out.pack")


def test_metadata_whose_shards_are_all_gone_says_so(tmp_path: Path) -> None:
    distributed(tmp_path)
    for shard in tmp_path.glob("*.distcp"):
        shard.unlink()
    with pytest.raises(UnsupportedCheckpointError, match=r"'__0_0\.distcp', which does not exist"):
        stream_pack.convert(tmp_path, tmp_path / "out.pack")


def test_a_hidden_file_beside_a_checkpoint_does_not_make_it_a_distributed_one(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_text("of another program")
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpointError, match=r"it holds 'model\.pt'"):
        stream_pack.convert(tmp_path, tmp_path / "out.pack")


def test_a_path_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    for name in ("missing", "missing.index.json"):
        with pytest.raises(FileNotFoundError):
            stream_pack.convert(tmp_path / name, tmp_path / "out.pack")


def test_an_array_may_have_any_name_and_the_pack_does_not_depend_on_it(tmp_path: Path) -> None:
    packs = []
    for name in ("a", "b"):
        mmap_ninja.np_from_ndarray(tmp_path / name, np.arange(4.0))
        stream_pack.convert(tmp_path / name, tmp_path / f"{name}.pack")
        packs.append((tmp_path / f"{name}.pack").read_bytes())
    assert packs[0] == packs[1]
