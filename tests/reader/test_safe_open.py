"""The same script runs on safetensors and on packs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import stream_pack
from stream_pack import MissingPackageError, OptionError, StateError, UnknownTensorError
from tests.support.packs import pack_bytes, tensors

CONTENT = {
    "b.weight": torch.arange(24.0).reshape(4, 6),
    "a.weight": torch.arange(6).to(torch.bfloat16),
    "c.bytes": torch.arange(10, dtype=torch.uint8),
    "c.flags": torch.tensor([True, False]),
    "d.scalar": torch.tensor(2.5, dtype=torch.float64),
    "e.empty": torch.empty(0, 3),
    "f.four": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 4),
}


def both(tmp_path: Path, content: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> tuple[Path, Path]:
    safetensors.torch.save_file(content, tmp_path / "model.safetensors", metadata=metadata)
    pack_bytes(tmp_path / "model.pack", content, metadata=metadata)
    return tmp_path / "model.safetensors", tmp_path / "model.pack"


def script(safe_open: Callable[..., Any], path: Path, framework: str) -> list[object]:
    """What scripts do with safetensors' safe_open."""
    seen: list[object] = []
    with safe_open(path, framework=framework, device="cpu") as f:
        seen += [f.metadata(), list(f.keys()), sorted(f.offset_keys())]
        for key in f.keys():  # noqa: SIM118 - what is opened is no mapping
            part = f.get_slice(key)
            shape = part.get_shape()
            seen += [key, shape, part.get_dtype()]
            if part.get_dtype() in ("BF16", "F4") and framework == "np":
                continue
            tensor = f.get_tensor(key)
            seen += [str(tensor.dtype), tuple(tensor.shape), bits(tensor)]
            if len(shape) == 2 and part.get_dtype() == "F32" and shape[0]:
                for rows in (part[1:3], part[:, 2:5], part[0], part[..., 1], part[2, 3:4], part[:]):
                    seen += [tuple(rows.shape), bits(rows)]
                tensor += 1
                seen.append(bits(tensor))
    return seen


def bits(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(tensor).tobytes()


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("metadata", [None, {"format": "pt", "é": ""}], ids=["none", "some"])
def test_one_script_sees_the_same_in_both(framework: str, metadata: dict[str, str] | None, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, CONTENT, metadata)
    before = ours.read_bytes()
    wanted = script(safetensors.safe_open, theirs, framework)
    assert script(stream_pack.safe_open, ours, framework) == wanted
    assert len(wanted) > 30
    assert ours.read_bytes() == before


def test_shapes_of_packed_float4_are_the_logical_ones_in_both(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, CONTENT, None)
    shapes = []
    for opened in (safetensors.safe_open(theirs, "pt"), stream_pack.safe_open(ours, "pt")):
        with opened as f:
            shapes.append((f.get_slice("f.four").get_shape(), tuple(f.get_tensor("f.four").shape)))
    assert shapes == [([2, 8], (2, 4))] * 2


def test_tensors_are_in_place_and_in_the_order_of_the_file(tmp_path: Path) -> None:
    pack_bytes(tmp_path / "pack")
    with stream_pack.safe_open(tmp_path / "pack") as f:
        assert f.offset_keys() == list(tensors())
        assert f.keys() == sorted(tensors())
        embed, head = f.get_tensor("embed"), f.get_tensor("head")
        assert isinstance(embed, torch.Tensor)
        assert isinstance(head, torch.Tensor)
        assert embed.data_ptr() == head.data_ptr()
        rows = f.get_slice("embed")[32:64]
        assert isinstance(rows, torch.Tensor)
        assert rows.data_ptr() == embed.data_ptr() + 32 * embed[0].nbytes
        assert f.get_tensors(["step", "norm"]).keys() == {"step", "norm"}
        assert list(f.get_tensors()) == list(tensors())
        with pytest.raises(UnknownTensorError):
            f.get_tensor("nothing")
    with pytest.raises(StateError):
        f.get_tensor("embed")


def test_a_device_gets_a_copy(tmp_path: Path) -> None:
    pack_bytes(tmp_path / "pack")
    with stream_pack.safe_open(tmp_path / "pack", framework="pt", device="meta") as f:
        found = f.get_tensor("embed")
        assert isinstance(found, torch.Tensor)
        assert found.device.type == "meta"
        assert f.get_slice("embed")[0:2].shape == (2, 32)
    loaded = stream_pack.load_file(tmp_path / "pack", device=torch.device("meta"))
    assert {tensor.device.type for tensor in loaded.values()} == {"meta"}
    for cpu in ("cpu", torch.device("cpu")):
        assert stream_pack.load_file(tmp_path / "pack", device=cpu)["step"].device.type == "cpu"


def test_frameworks_backends_and_devices_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    pack_bytes(tmp_path / "pack")
    with pytest.raises(OptionError, match="'caffe'"):
        stream_pack.safe_open(tmp_path / "pack", framework="caffe")
    with pytest.raises(OptionError, match="'cpu'"):
        stream_pack.safe_open(tmp_path / "pack", framework="np", device="mps")
    with pytest.raises(OptionError, match="'mmap' or 'pread'"):
        stream_pack.safe_open(tmp_path / "pack", backend="http")


@pytest.mark.parametrize(
    ("framework", "module", "package"),
    [("jax", "jax", "jax"), ("flax", "jax", "jax"), ("mlx", "mlx", "mlx"), ("tf", "tensorflow", "tensorflow"),
     ("paddle", "paddle", "paddlepaddle")],
)  # fmt: skip
def test_a_framework_that_is_not_installed_is_named(
    framework: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    pack_bytes(tmp_path / "pack")
    with pytest.raises(MissingPackageError, match=f"pip install {package}") as caught:
        stream_pack.safe_open(tmp_path / "pack", framework=framework)
    assert caught.value.package == package


def test_progress_counts_the_bytes_of_the_tensors_that_are_there(tmp_path: Path) -> None:
    content = {"a": torch.zeros(10), "b": torch.zeros(6, dtype=torch.int8), "none": torch.empty(0)}
    pack_bytes(tmp_path / "pack", content)
    steps: list[tuple[int, int]] = []
    stream_pack.load_file(tmp_path / "pack", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(40, 46), (46, 46), (46, 46)]
    steps.clear()
    stream_pack.load_file(tmp_path / "pack", names="b", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(6, 6)]


def test_load_file_is_torch_load_without_the_copy(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    data = pack_bytes(path)
    state = stream_pack.load_file(path)
    assert list(state) == list(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(state[name], tensor)
    assert state["embed"].data_ptr() == state["head"].data_ptr()
    state["embed"].zero_()
    assert path.read_bytes() == data


def test_load_file_of_some_names_keeps_their_order_and_knows_the_unknown(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    pack_bytes(path)
    assert list(stream_pack.load_file(path, names=["step", "embed"])) == ["step", "embed"]
    assert list(stream_pack.load_file(str(path), names=iter(["norm"]))) == ["norm"]
    assert stream_pack.load_file(path, names=[]) == {}
    with pytest.raises(UnknownTensorError, match="'nothing'"):
        stream_pack.load_file(path, names=["step", "nothing"])


def test_a_module_takes_the_tensors_and_keeps_them_tied(tmp_path: Path) -> None:
    # HF#13466
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    model = Model()
    stream_pack.save_file(model, tmp_path / "pack")
    with torch.device("meta"):
        empty = Model()
    empty.load_state_dict(stream_pack.load_file(tmp_path / "pack"), assign=True)
    assert empty.head.weight.data_ptr() == empty.embed.weight.data_ptr()
    assert torch.equal(empty.head.weight, model.head.weight)


def test_one_name_is_one_name_and_not_its_letters(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    stream_pack.save_file({"wq": torch.ones(2), "w": torch.zeros(2), "q": torch.zeros(2)}, path)
    assert list(stream_pack.load_file(path, names="wq")) == ["wq"]
    with stream_pack.safe_open(path) as opened:
        assert list(opened.get_tensors("wq")) == ["wq"]
