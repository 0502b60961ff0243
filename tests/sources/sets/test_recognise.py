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
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        UnsupportedCheckpointError, match=r"it holds 'a\.safetensors', 'b\.s.*': pass the path of a file"
    ):
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
    with pytest.raises(UnsupportedCheckpointError, match=r"^'model\.pt': cannot convert this input: it is empty"):
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


def save_as(path: Path, value: float) -> None:
    """One tensor, ``w``, filled with ``value``, in the format of the name."""
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({"w": torch.full((2,), value)}, path)
    else:
        torch.save({"w": torch.full((2,), value)}, path)


TRAINING_STATE = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state.pth",
    "rng_state_1.pth",
)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "diffusion_pytorch_model.safetensors",
        "consolidated.safetensors", "pytorch_model_fsdp.bin", "checkpoint.pt", "model-00001-of-00001.safetensors",
    ],
)  # fmt: skip
def test_the_only_file_of_weights_in_a_folder_is_taken(name: str, tmp_path: Path) -> None:
    save_as(tmp_path / name, 1.0)
    (tmp_path / "config.json").write_text("{}")
    for other in TRAINING_STATE:
        save_as(tmp_path / other, 7.0)
    report = stream_pack.convert(tmp_path, tmp_path / "out.pack")
    assert report.warnings == ()
    assert report.remarks == ("a pack has tensors only; these files of the folder are not in it: 'config.json'",)
    assert stream_pack.load_file(tmp_path / "out.pack")["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("taken", "passed_over"),
    [
        ("model.safetensors", "pytorch_model.bin"),
        ("adapter_model.safetensors", "adapter_model.bin"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    ],
)
def test_of_a_model_in_two_formats_safetensors_is_taken_and_it_is_said(
    taken: str, passed_over: str, tmp_path: Path
) -> None:
    save_as(tmp_path / taken, 1.0)
    save_as(tmp_path / passed_over, 2.0)
    report = stream_pack.convert(tmp_path, tmp_path / "out.pack")
    assert report.remarks == (f"using '{taken}', not '{passed_over}': transformers prefers safetensors, too",)
    assert stream_pack.load_file(tmp_path / "out.pack")["w"].tolist() == [1.0, 1.0]


def test_a_pack_beside_the_file_that_it_was_made_of_is_no_second_checkpoint(tmp_path: Path) -> None:
    save_as(tmp_path / "model.safetensors", 1.0)
    for name in ("first.pack", "second.pack"):
        stream_pack.convert(tmp_path, tmp_path / name)
    assert (tmp_path / "first.pack").read_bytes() == (tmp_path / "second.pack").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "second.pack").unlink()
    assert stream_pack.convert(tmp_path, tmp_path / "third.pack").source_kind == "pack"


def sharded_bin(folder: Path) -> None:
    save_as(folder / "pytorch_model-00001-of-00002.bin", 2.0)
    torch.save({"v": torch.ones(1)}, folder / "pytorch_model-00002-of-00002.bin")
    weight_map = {"w": "pytorch_model-00001-of-00002.bin", "v": "pytorch_model-00002-of-00002.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_whole_file_of_safetensors_is_taken_before_an_index_of_the_older_format(tmp_path: Path) -> None:
    sharded_bin(tmp_path)
    assert set(stream_pack.convert(tmp_path, tmp_path / "out.pack").remarks) == set()
    save_as(tmp_path / "model.safetensors", 1.0)
    report = stream_pack.convert(tmp_path, tmp_path / "out.pack")
    assert "using 'model.safetensors', not 'pytorch_model.bin.index.json'" in report.remarks[0]
    assert stream_pack.load_file(tmp_path / "out.pack")["w"].tolist() == [1.0, 1.0]


def test_an_index_of_safetensors_is_taken_before_one_of_the_older_format(tmp_path: Path) -> None:
    sharded_bin(tmp_path)
    hugging_face(tmp_path)
    report = stream_pack.convert(tmp_path, tmp_path / "out.pack")
    assert "using 'model.safetensors.index.json', not 'pytorch_model.bin.index.json'" in report.remarks[0]
    assert list(stream_pack.load_file(tmp_path / "out.pack")) == ["norm.weight"]


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "adapter_model.safetensors"),
        ("model.safetensors", "model.fp16.safetensors"),
        ("model.safetensors", "other.safetensors"),
        ("a.gguf", "b.gguf"),
        ("model-00001-of-00002.safetensors",),
        ("training_args.bin",),
    ],
)
def test_a_folder_that_is_not_one_model_is_never_guessed_at(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        save_as(tmp_path / name, 1.0) if name.endswith("safetensors") else (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(
        UnsupportedCheckpointError, match="no known kind of checkpoint.*pass the path of a file"
    ) as caught:
        stream_pack.convert(tmp_path, tmp_path / "out.pack")
    assert all(repr(name) in str(caught.value) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("model.safetensors",), ("pytorch_model.bin",), ("model.safetensors", "pytorch_model.bin")]
)
def test_what_is_taken_is_what_transformers_loads(names: tuple[str, ...], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16
    )
    for number, name in enumerate(names):
        torch.manual_seed(number)
        model = transformers.BertModel(config)
        model.save_pretrained(tmp_path)
        if name == "pytorch_model.bin":
            torch.save(model.state_dict(), tmp_path / name)
            if names == (name,):
                (tmp_path / "model.safetensors").unlink()
    if len(names) == 2:
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(tmp_path)
    stream_pack.convert(tmp_path, tmp_path / "out.pack")
    loaded = transformers.BertModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in stream_pack.load_file(tmp_path / "out.pack").items():
        assert torch.equal(torch.as_tensor(tensor), loaded[name]), name
