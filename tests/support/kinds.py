"""Every kind of source, made by its own library, and the tensors that it has."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import gguf
import mmap_ninja
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import stream_pack

__all__ = ["KINDS", "Made", "bits", "equal"]

Made: TypeAlias = tuple[Path, dict[str, torch.Tensor]]

W = torch.arange(60.0).reshape(6, 10)
PLAIN = {"w": W, "half": torch.arange(7).half(), "ids": torch.arange(5)}
FULL = {
    **PLAIN,
    "tied": W,
    "rows": W[2:4],
    "turned": W.t(),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "bf16": torch.arange(4).bfloat16(),
    "flags": torch.tensor([True, False]),
    "f8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "u16": torch.arange(3).to(torch.uint16),
    "c64": torch.tensor([1 + 2j]),
}


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Same names, dtypes, shapes and bits; the order does not count."""

    def known(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        return {name: (t.dtype, tuple(t.shape), bits(t)) for name, t in tensors.items()}

    return known(found) == known(wanted)


def torch_zip(folder: Path) -> Made:
    torch.save(FULL, folder / "m.pt")
    return folder / "m.pt", FULL


def torch_legacy(folder: Path) -> Made:
    old = {name: tensor for name, tensor in FULL.items() if name not in ("f8", "u16")}
    torch.save(old, folder / "m.pt", _use_new_zipfile_serialization=False)
    return folder / "m.pt", old


def safetensors_file(folder: Path) -> Made:
    safetensors.torch.save_file(PLAIN, folder / "m.safetensors")
    return folder / "m.safetensors", PLAIN


def gguf_file(folder: Path) -> Made:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for name, tensor in PLAIN.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf", PLAIN


def pack(folder: Path) -> Made:
    stream_pack.save_file(FULL, folder / "m.pack")
    return folder / "m.pack", FULL


def hugging_face(folder: Path) -> Made:
    weight_map = {}
    for number, (name, tensor) in enumerate(PLAIN.items()):
        safetensors.torch.save_file({name: tensor}, folder / f"{number}.safetensors")
        weight_map[name] = f"{number}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, PLAIN


def llama(folder: Path) -> Made:
    params = {"dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 4}
    (folder / "params.json").write_text(json.dumps(params))
    name = "layers.0.attention.wq.weight"
    whole = torch.arange(64.0).reshape(8, 8)
    for rank in range(2):
        torch.save({name: whole[4 * rank : 4 * rank + 4].clone()}, folder / f"consolidated.{rank:02d}.pth")
    return folder, {name: whole}


def distributed(folder: Path) -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(PLAIN), storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder, PLAIN


def ninja(folder: Path) -> Made:
    mmap_ninja.np_from_ndarray(folder / "n", W.numpy())
    return folder / "n", {"data": W}


def nested(folder: Path) -> Made:
    torch.save({"epoch": 3, "state_dict": PLAIN}, folder / "m.ckpt")
    return folder / "m.ckpt", PLAIN


KINDS: dict[str, Callable[[Path], Made]] = {
    made.__name__: made
    for made in (
        torch_zip, torch_legacy, safetensors_file, gguf_file, pack, hugging_face, llama, distributed, ninja, nested,
    )
}  # fmt: skip
