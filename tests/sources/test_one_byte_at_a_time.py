"""A pipe that gives a byte at a time makes the very pack that the file makes, whatever the format."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack
from tests.sources.byte_sources import Dribble
from tests.support.torch_zips import records, saved

W = torch.arange(60.0).reshape(6, 10)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "w": W,
        "tied": W,
        "rows": W[2:4],
        "t": W.t(),
        "half": torch.arange(7).half(),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "conj": torch.tensor([1 + 2j]).conj(),
    }


def torch_zip(path: Path) -> None:
    path.write_bytes(saved(tensors()))


def torch_legacy(path: Path) -> None:
    path.write_bytes(saved(tensors(), _use_new_zipfile_serialization=False))


def training(path: Path) -> None:
    path.write_bytes(saved({"model": tensors(), "optimizer": {"state": {0: {"avg": W}}}}))


def deflated(path: Path) -> None:
    _again(path, sort=False)


def pickle_last(path: Path) -> None:
    _again(path, sort=True)


def _again(path: Path, *, sort: bool) -> None:
    parts = records(saved(tensors()))
    names = sorted(parts, key=lambda name: name == "data.pkl") if sort else list(parts)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED if sort else zipfile.ZIP_DEFLATED) as made:
        for name in names:
            made.writestr(f"archive/{name}", parts[name])


def safetensors_file(path: Path) -> None:
    safetensors.torch.save_file({"w": W, "ids": torch.arange(5)}, path, metadata={"note": json.dumps({"a": 1})})


def gguf_file(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "b"])
    writer.add_tensor("w", W.numpy())
    writer.add_tensor("ids", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack(path: Path) -> None:
    stream_pack.save_file(tensors(), path, metadata={"note": "x"})


@pytest.mark.parametrize(
    "write", [torch_zip, torch_legacy, training, deflated, pickle_last, safetensors_file, gguf_file, pack]
)
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16", "order": "name", "exclude": "none"}])
def test_a_pipe_of_single_bytes_makes_the_pack_of_the_file(
    write: Callable[[Path], None], options: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "source"
    write(path)
    stream_pack.convert(path, tmp_path / "expected", **options)  # type: ignore[arg-type]
    expected = (tmp_path / "expected").read_bytes()
    with stream_pack.open(tmp_path / "expected") as made:
        assert torch.equal(made["w"].torch().float(), W)
    data = path.read_bytes()
    stream_pack.convert(Dribble(data, step=1), tmp_path / "pack", **options)  # type: ignore[arg-type]
    assert (tmp_path / "pack").read_bytes() == expected
    for source in (path, Dribble(data, step=1)):
        target = io.BytesIO()
        stream_pack.convert(source, target, spool_dir=tmp_path, **options)  # type: ignore[arg-type]
        assert target.getvalue() == expected
