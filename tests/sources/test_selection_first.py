"""What is left out is not judged, whatever the source: only what is taken can be refused."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed_state

import stream_pack
from stream_pack.cli import main
from stream_pack.errors import SourceError, StreamPackError, UnsupportedTensorError
from tests.sources.torch_save.test_legacy import legacy
from tests.support.torch_zips import saved

pytestmark = pytest.mark.filterwarnings("ignore")


WITH_BAD: list[dict[str, object]] = [{}, {"include": ["good", "bad"]}, {"exclude": "goo*"}]
WITHOUT_BAD: list[dict[str, object]] = [{"exclude": "bad"}, {"include": ["good"]}, {"include": "*", "exclude": ["b*"]}]


def bits(nbytes: int) -> torch.Tensor:
    """Of a dtype that packs do not have."""
    return torch.zeros(nbytes, dtype=torch.uint8).view(torch.bits8)


BAD: dict[str, Callable[[], object]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "bits8": lambda: bits(4),
    "meta": lambda: torch.empty(2, device="meta"),
    "a bare storage": lambda: torch.ones(2).untyped_storage(),
    "an object": lambda: argparse.Namespace(lr=1.0),
}


def with_header(header: Mapping[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_f6(path: Path) -> Path:
    header = {
        "good": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "bad": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [12, 15]},
        "more": {"dtype": "U8", "shape": [1], "data_offsets": [15, 16]},
    }
    path.write_bytes(with_header(header, np.ones(3, "<f4").tobytes() + b"abc" + b"\7"))
    return path


def gguf_with(path: Path, *, last: bool) -> Path:
    """A tensor of a type that nobody knows, between two others or at the end."""
    names = ["good", "more", "bad"] if last else ["good", "bad", "more"]
    infos = b""
    for number, name in enumerate(names):
        kind = 99 if name == "bad" else gguf.GGMLQuantizationType.F32.value
        infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQIQ", 1, 3, kind, 32 * number)
    head = b"GGUF" + struct.pack("<IQQ", 3, 3, 0) + infos
    data = np.ones(3, "<f4").tobytes().ljust(32, b"\0") * 3
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def refused_then_taken(source: Callable[[], object], target: Path) -> stream_pack.Report:
    """``bad`` is refused by name where it is taken, and in nobody's way where it is not."""
    for selection in WITH_BAD:
        with pytest.raises(SourceError, match=r"bad.*--exclude"):
            stream_pack.convert(source(), target, **selection)  # type: ignore[arg-type]
        with pytest.raises(SourceError, match=r"bad.*--exclude"):
            stream_pack.forecast(source(), **selection)  # type: ignore[arg-type]
    assert not target.exists()
    for selection in WITHOUT_BAD:
        stream_pack.forecast(source(), **selection)  # type: ignore[arg-type]
        report = stream_pack.convert(source(), target, **selection)  # type: ignore[arg-type]
        assert stream_pack.load_file(target)["good"].tolist() == [1, 1, 1]
        assert "bad" not in stream_pack.load_file(target)
    return report


def from_file_and_pipe(path: Path) -> list[Callable[[], object]]:
    return [lambda: path, lambda: io.BytesIO(path.read_bytes())]


@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", BAD)
def test_a_part_of_a_checkpoint_that_no_pack_can_hold(
    tmp_path: Path, kind: str, write: Callable[[object], bytes]
) -> None:
    (tmp_path / "source").write_bytes(write({"good": torch.ones(3), "bad": BAD[kind]()}))
    for source in from_file_and_pipe(tmp_path / "source"):
        report = refused_then_taken(source, tmp_path / "pack")
        assert "left out, and could not have been packed: 'bad'" in report.remarks
        assert report.warnings == ()
        (tmp_path / "pack").unlink()


def test_a_view_beyond_its_storage(tmp_path: Path) -> None:
    data = saved({"good": torch.ones(3), "bad": torch.zeros(64)[5:6]})
    # The offset of "bad", a BININT1 before its shape: 5 becomes 200 of 64.
    assert data.count(b"K\x05K\x01\x85") == 1
    (tmp_path / "source").write_bytes(_resealed(data, b"K\x05K\x01\x85", b"K\xc8K\x01\x85"))
    for source in from_file_and_pipe(tmp_path / "source"):
        refused_then_taken(source, tmp_path / "pack")
        (tmp_path / "pack").unlink()


def _resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """The archive with other bytes in its pickle, packed anew."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            record = source.read(entry)
            copy.writestr(entry.filename, record.replace(old, new) if entry.filename.endswith("data.pkl") else record)
    return target.getvalue()


def test_tensors_in_memory_and_in_a_module(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("good", torch.ones(3))
            self.register_buffer("bad", torch.eye(3).to_sparse())

    refused_then_taken(Module, tmp_path / "pack")
    for kind in BAD:
        (tmp_path / "pack").unlink()
        refused_then_taken(lambda: {"good": torch.ones(3), "bad": BAD[kind]()}, tmp_path / "pack")  # noqa: B023


def test_a_dtype_of_safetensors_that_packs_do_not_have(tmp_path: Path) -> None:
    for source in from_file_and_pipe(safetensors_f6(tmp_path / "m.safetensors")):
        refused_then_taken(source, tmp_path / "pack")
        (tmp_path / "pack").unlink()


@pytest.mark.parametrize("last", [False, True])
def test_a_type_of_gguf_that_is_not_known(tmp_path: Path, last: bool) -> None:
    for source in from_file_and_pipe(gguf_with(tmp_path / "m.gguf", last=last)):
        refused_then_taken(source, tmp_path / "pack")
        (tmp_path / "pack").unlink()


def test_a_shard_of_a_hugging_face_set(tmp_path: Path) -> None:
    safetensors_f6(tmp_path / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file({"other": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(["good", "bad", "more"], "model-00001-of-00002.safetensors")
    index = {"weight_map": {**places, "other": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_then_taken(lambda: tmp_path, tmp_path.parent / "hf.pack")
    (tmp_path.parent / "hf.pack").unlink()


def test_llama_shards(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"dim": 4, "n_heads": 2}))
    for number in range(2):
        shard = {"good": torch.ones(4), "layers.0.bad": bits(4), "layers.0.attention.wo.weight": torch.ones(4, 2)}
        shard["layers.0.bad.norm.weight"] = shard.pop("good")
        (tmp_path / f"consolidated.{number:02}.pth").write_bytes(saved(shard))
    with pytest.raises(StreamPackError, match=r"'layers\.0\.bad' is of dtype 'torch.bits8'.*--exclude"):
        stream_pack.convert(tmp_path, tmp_path.parent / "llama.pack")
    stream_pack.convert(tmp_path, tmp_path.parent / "llama.pack", exclude="layers.0.bad")
    assert len(stream_pack.load_file(tmp_path.parent / "llama.pack")) == 2
    (tmp_path.parent / "llama.pack").unlink()


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    tensors = {"good": torch.ones(3), "bad": torch.zeros(4, dtype=torch.uint8)}
    save_distributed_state(tensors, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.state_dict_metadata["bad"].properties.dtype = torch.bits8
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    refused_then_taken(lambda: tmp_path / "dcp", tmp_path / "pack")


# -- objects that need code


LIGHTNING = {"state_dict": {"w": torch.ones(3)}, "hyper_parameters": argparse.Namespace(lr=1e-3)}


@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "legacy"])
@pytest.mark.parametrize("arguments", [[], ["--key", "state_dict"], ["--key", ".", "--include", "state_dict.*"]])
def test_an_object_beside_what_is_taken_is_named_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], write: Callable[[object], bytes], arguments: list[str]
) -> None:
    (tmp_path / "pl.ckpt").write_bytes(write(LIGHTNING))
    assert main(["convert", str(tmp_path / "pl.ckpt"), str(tmp_path / "pack"), "--strict", *arguments]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "Namespace" in line or "hyper_parameters" in line]
    assert len(lines) == 1
    assert "note: " in lines[0]
    (tensor,) = stream_pack.load_file(tmp_path / "pack").values()
    assert tensor.tolist() == [1, 1, 1]


def test_what_is_listed_as_taken_by_default_is_taken(tmp_path: Path) -> None:
    data = saved({**LIGHTNING, "ema": {"w": torch.zeros(3)}, "args": argparse.Namespace(x=bits(4))})
    rows = {row.path: row for row in stream_pack.list_keys(io.BytesIO(data))}
    assert rows["state_dict",].chosen
    for options in ({}, {"key": "state_dict"}, {"key": "ema"}):
        report = stream_pack.convert(io.BytesIO(data), tmp_path / "pack", **options)  # type: ignore[arg-type]
        assert report.tensors == 1
        assert "argparse.Namespace" in " ".join(report.remarks)


def test_an_object_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StreamPackError,
        match=r"'argparse.Namespace' \(under 'hyper_parameters'\); leave them out with --ignore-unknown",
    ):
        stream_pack.convert(io.BytesIO(saved(LIGHTNING)), tmp_path / "pack", key=".")
    report = stream_pack.convert(io.BytesIO(saved(LIGHTNING)), tmp_path / "pack", key=".", ignore_unknown=True)
    assert "argparse.Namespace" in " ".join(report.remarks)


def test_all_that_cannot_be_packed_is_named_at_once(tmp_path: Path) -> None:
    data = saved({name: torch.eye(2).to_sparse() for name in "abc"} | {"w": torch.ones(1)})
    with pytest.raises(StreamPackError, match=r"tensor 'a' is sparse.*'b', 'c' cannot be packed either"):
        stream_pack.convert(io.BytesIO(data), tmp_path / "pack")
    with pytest.raises(UnsupportedTensorError) as caught:
        stream_pack.convert({"q": bits(2), "w": torch.ones(1)}, tmp_path / "pack")
    assert caught.value.tensor == "q"
