"""Folders: shards and their index for transformers, what stood beside the source, and what must not be lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stream_pack
from stream_pack.errors import SourceError, TruncatedSourceError
from tests.writer.test_pack import ScriptedSource

TENSORS = {f"t{k}": torch.full((10,), float(k)) for k in range(5)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a tied Llama, in shards, with what a tokenizer adds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="4KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "notes.bak").write_text("not for loaders")
    return tmp_path / "model"


@pytest.mark.parametrize("tied", ["duplicate", "drop"])
@pytest.mark.parametrize("most", [None, 6000])
def test_transformers_loads_what_comes_out(model: Path, tied: str, most: int | None, tmp_path: Path) -> None:
    trained = LlamaForCausalLM.from_pretrained(model)
    assert isinstance(trained, LlamaForCausalLM)
    stream_pack.save_file(trained, tmp_path / "pack")  # with the tie, which the shards do not have
    for number, source in enumerate((tmp_path / "pack", model)):
        folder = tmp_path / f"out{number}"
        report = stream_pack.extract(source, f"{folder}/", tied=tied, max_shard_nbytes=most)  # type: ignore[arg-type]
        assert (len(report.files) > 1) == (most is not None)
        if source == model:
            assert report.copied == ("config.json", "generation_config.json", "tokenizer.json")
        else:
            assert report.copied == ()
            trained.config.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        tokens = torch.tensor([[1, 2, 3]])
        assert torch.equal(again(tokens).logits, trained(tokens).logits)
        assert not (folder / "notes.bak").exists()


def test_the_index_names_every_tensor_and_the_bytes_of_all(tmp_path: Path) -> None:
    report = stream_pack.extract(TENSORS, tmp_path / "out", max_shard_nbytes=85)
    names = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    assert [file.name for file in report.files] == names
    assert [file.nbytes for file in report.files] == [(tmp_path / "out" / name).stat().st_size for name in names]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 200},
        "weight_map": {f"t{k}": names[k // 2] for k in range(5)},
    }
    for name in names:
        for key, tensor in safetensors.torch.load_file(tmp_path / "out" / name).items():
            assert (index["weight_map"][key], tensor.tolist()) == (name, TENSORS[key].tolist())
    again = stream_pack.convert(tmp_path / "out", tmp_path / "pack")
    assert again.tensors == 5


def test_a_tensor_that_is_longer_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    given = {"a": torch.ones(1), "big": torch.ones(100), "b": torch.ones(1)}
    report = stream_pack.extract(given, tmp_path / "out", max_shard_nbytes=8)
    assert [file.nbytes > 400 for file in report.files] == [False, True, False]


def test_other_weights_in_the_folder_are_not_shadowed(tmp_path: Path) -> None:
    stream_pack.extract(TENSORS, f"{tmp_path}/out/", max_shard_nbytes=85)
    with pytest.raises(SourceError, match=r"holds other weights, 'model-00001-of-00003.safetensors', .*another folder"):
        stream_pack.extract(TENSORS, tmp_path / "out")  # which is one file now, and a folder
    before = sorted(os.listdir(tmp_path / "out"))
    stream_pack.extract(TENSORS, tmp_path / "out", max_shard_nbytes=85)  # the same files are replaced
    assert sorted(os.listdir(tmp_path / "out")) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_failure_leaves_the_folder_as_it_was(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    if there:
        folder.mkdir()
        (folder / "mine").write_text("x")
    source = ScriptedSource({"a": 4, "b": 4}, [(0, b"abcd"), (1, b"ab")])
    with pytest.raises(TruncatedSourceError):
        stream_pack.extract(source, f"{folder}/", max_shard_nbytes=4)
    assert folder.exists() == there
    assert not there or os.listdir(folder) == ["mine"]


def test_convert_says_what_of_a_folder_is_not_in_the_pack(model: Path, tmp_path: Path) -> None:
    said = "'config.json', 'generation_config.json', 'tokenizer.json'"
    report = stream_pack.convert(model, tmp_path / "pack")
    (remark,) = report.remarks
    assert said in remark
    assert stream_pack.forecast(model / "model.safetensors.index.json").remarks == report.remarks
    assert stream_pack.convert(tmp_path / "pack", tmp_path / "again").remarks == ()
