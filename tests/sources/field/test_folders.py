"""Every kind of set of files makes the pack that its tensors make by themselves, into a file and into a stream.

Sets that contradict themselves, and what two ranks have saved, are tested with their sources, in
``tests/sources/sets``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import mmap_ninja
import numpy as np
import pytest
import torch

import stream_pack
from tests.sources.sets.test_dcp import save
from tests.sources.sets.test_hugging_face import bin_shards, shards, write_bin, write_safetensors
from tests.sources.sets.test_llama import LLAMA_2, LLAMA_3, cut, whole_model, write

Values = dict[str, object]


def joined(parts: Iterable[dict[str, torch.Tensor]]) -> Values:
    return {name: tensor for part in parts for name, tensor in part.items()}


def safetensors_shards(folder: Path) -> Values:
    write_safetensors(folder)
    return joined(shards())


def bin_files(folder: Path) -> Values:
    write_bin(folder)
    return joined(bin_shards())


def llama_2(folder: Path) -> Values:
    write(folder, cut(whole_model(), 2, LLAMA_2))
    return joined([whole_model()])


def llama_3(folder: Path) -> Values:
    write(folder, cut(whole_model(), 4, LLAMA_3))
    return joined([whole_model()])


def distributed(folder: Path) -> Values:
    save(whole_model(), folder)
    return joined([whole_model()])


def ninja(folder: Path) -> Values:
    data = np.arange(30.0).reshape(6, 5)
    mmap_ninja.np_from_ndarray(folder, data)
    return {"data": data}


def ragged(folder: Path) -> Values:
    samples = [np.arange(6.0).reshape(2, 3), np.arange(7.0), np.ones((1, 4, 2))]
    mmap_ninja.RaggedMmap.from_lists(folder, samples)
    return {f"data.{number}": sample for number, sample in enumerate(samples)}


FOLDERS: dict[str, Callable[[Path], Values]] = {
    "a Hugging Face index of safetensors files": safetensors_shards,
    "a Hugging Face index of torch.save files": bin_files,
    "Llama 2 in two shards": llama_2,
    "Llama 3 in four shards": llama_3,
    "a torch.distributed checkpoint": distributed,
    "an mmap-ninja array": ninja,
    "a ragged mmap-ninja array": ragged,
}


@pytest.mark.parametrize("make", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_makes_the_pack_of_its_tensors(make: Callable[[Path], Values], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    values = make(folder)
    # The safetensors files carry metadata, which comes along.
    metadata = {"format": "pt"} if make is safetensors_shards else {}
    stream_pack.convert(values, tmp_path / "expected", order="name", metadata=metadata)
    stream = io.BytesIO()
    for target in (tmp_path / "pack", stream):
        stream_pack.convert(folder, target, order="name", spool_dir=tmp_path)
    assert (tmp_path / "pack").read_bytes() == (tmp_path / "expected").read_bytes()
    assert stream.getvalue() == (tmp_path / "expected").read_bytes()
