"""Looking at checkpoints: every tensor, where it is, and what a conversion would make of it, from the head alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import mmap_ninja
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import stream_pack
from stream_pack import OptionError, SourceError, UnsupportedCheckpointError
from stream_pack.cli import main
from tests.support.sparse_files import nbytes_read, save_sparse

MIB = 1 << 20
LAYERS, ROWS = 32, 8 * MIB  # of float32: a gibibyte in all

needs_io = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes are counted through Linux's /proc")


def state() -> dict[str, torch.Tensor]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "embed": weight,
        "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        "none": torch.empty(0, 5),
        "half": torch.arange(5).to(torch.bfloat16),
        "head": weight,
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def in_zip(folder: Path) -> Path:
    torch.save(state(), folder / "model.pt")
    return folder / "model.pt"


def in_legacy(folder: Path) -> Path:
    torch.save(state(), folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def in_safetensors(folder: Path) -> Path:
    tensors = {name: tensor.contiguous().clone() for name, tensor in state().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def in_shards(folder: Path) -> Path:
    tensors = {name: tensor.contiguous().clone() for name, tensor in state().items()}
    files = dict(zip(tensors, ["a.safetensors", "a.safetensors", "b.safetensors", "b.safetensors", "b.safetensors"]))
    for file in set(files.values()):
        safetensors.torch.save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def in_dcp(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        save_distributed(dict(state()), storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


PLACED = {"embed", "half", "head"}  # contiguous, with bytes
ALL = {*PLACED, "turned"}
KINDS: dict[str, tuple[Callable[[Path], Path], str, set[str]]] = {
    "torch zip": (in_zip, "CRC-32 of each record", PLACED),
    "torch legacy": (in_legacy, "none", PLACED),
    "safetensors": (in_safetensors, "none", ALL),
    "Hugging Face set of 2 files": (in_shards, "none", ALL),
    "torch.distributed checkpoint": (in_dcp, "CRC-32 of each record", PLACED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_listed_and_lies_where_it_is_said_to(kind: str, tmp_path: Path) -> None:
    make, checksums, placed = KINDS[kind]
    path = make(tmp_path)
    found = stream_pack.inspect(path)
    assert (found.kind, found.checksums, found.path) == (kind, checksums, str(path))
    rows = {row.name: row for row in found.rows}
    assert rows.keys() == state().keys()
    for name, tensor in state().items():
        row = rows[name]
        assert (f"torch.{row.dtype}", row.shape, row.nbytes) == (str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
        assert (row.file_offset is not None) == (name in placed)
        if row.file_offset is not None:
            file = path if path.is_file() else next(path.glob(row.file or "*.distcp"))
            assert file.read_bytes()[row.file_offset :][: row.nbytes] == as_bytes(tensor)
    assert found.tensors_nbytes == sum(tensor.nbytes for tensor in state().values())
    assert found.refused == ()
    assert found.refusal is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_of_the_pack_is_that_which_convert_makes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = KINDS[kind][0](tmp_path / "in")
    found = stream_pack.inspect(path)
    report = stream_pack.convert(path, tmp_path / "out.pack")
    assert found.pack_nbytes == (tmp_path / "out.pack").stat().st_size
    assert (found.warnings, found.remarks) == (report.warnings, report.remarks)


def test_ties_are_told(tmp_path: Path) -> None:
    rows = {row.name: row for row in stream_pack.inspect(in_zip(tmp_path)).rows}
    assert rows["embed"].shared_with == rows["head"].number
    assert rows["head"].shared_with == rows["embed"].number
    assert rows["half"].shared_with is None
    part = torch.zeros(8)
    torch.save({"whole": part, "part": part[2:4]}, tmp_path / "part.pt")
    whole, inside = stream_pack.inspect(tmp_path / "part.pt").rows
    assert (whole.inside, inside.inside) == (None, whole.number)


def test_the_files_of_a_set_are_named_with_their_lengths(tmp_path: Path) -> None:
    found = stream_pack.inspect(in_shards(tmp_path))
    lengths = {file.name: file.nbytes for file in found.files}
    assert lengths == {name: (tmp_path / name).stat().st_size for name in ("a.safetensors", "b.safetensors")}
    assert found.nbytes == sum(lengths.values()) == sum(part.nbytes for part in found.parts)
    assert {row.name: row.file for row in found.rows if row.nbytes} == {
        "embed": "a.safetensors",
        "turned": "a.safetensors",
        "half": "b.safetensors",
        "head": "b.safetensors",
    }
    lines = found.to_text().splitlines()
    assert "a.safetensors" in next(line for line in lines if line.startswith("embed "))


def test_a_tensor_of_many_files_is_in_none(tmp_path: Path) -> None:
    for number in range(2):
        torch.save(
            {"layers.0.attention.wq.weight": torch.ones(4, 8), "norm.weight": torch.ones(8)},
            tmp_path / f"consolidated.{number:02}.pth",
        )
    (tmp_path / "params.json").write_text('{"dim": 8, "n_heads": 2}')
    found = stream_pack.inspect(tmp_path)
    wq, norm = found.rows
    assert (wq.shape, wq.file, wq.file_offset) == ((8, 8), None, None)
    assert norm.file == "consolidated.00.pth"
    data = (tmp_path / norm.file).read_bytes()
    assert data[norm.file_offset :][:32] == as_bytes(torch.ones(8))
    assert "several" in found.to_text()


def test_what_fills_a_file_adds_up_where_everything_has_a_place(tmp_path: Path) -> None:
    path = in_safetensors(tmp_path)
    found = stream_pack.inspect(path)
    header_nbytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert [(part.name, part.nbytes) for part in found.parts] == [
        ("before the tensors", 8 + header_nbytes),
        ("tensors", 48 + 12 + 10 + 48),
        ("between the tensors", 0),
        ("after the tensors", 0),
    ]
    assert sum(part.nbytes for part in found.parts) == found.nbytes == path.stat().st_size
    assert stream_pack.inspect(in_zip(tmp_path)).parts == ()  # one tensor is strided


def test_a_compressed_record_has_no_place(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
    (row,) = stream_pack.inspect(tmp_path / "packed.pt").rows
    assert (row.nbytes, row.file_offset) == (4000, None)


def test_tensors_of_gguf_have_their_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("norm", np.ones(32, np.float32))
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = stream_pack.inspect(tmp_path / "model.gguf")
    assert found.kind == "GGUF"
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    for row, tensor in zip(found.rows, reader.tensors, strict=True):
        assert (row.name, row.nbytes, row.file_offset) == (tensor.name, tensor.n_bytes, tensor.data_offset)
    assert [row.quantization for row in found.rows] == [None, "Q8_0"]
    stream_pack.convert(tmp_path / "model.gguf", tmp_path / "model.pack")
    assert [row.quantization for row in stream_pack.inspect(tmp_path / "model.pack").rows] == [None, "Q8_0"]


def test_arrays_of_mmap_ninja_lie_in_their_file(tmp_path: Path) -> None:
    mmap_ninja.np_from_ndarray(tmp_path / "plain", np.arange(10, dtype=np.int32))
    mmap_ninja.np_from_ndarray(tmp_path / "turned", np.asfortranarray(np.arange(10.0).reshape(2, 5)))
    mmap_ninja.RaggedMmap.from_lists(tmp_path / "ragged", [np.arange(3), np.arange(5)])
    assert [row.file_offset for row in stream_pack.inspect(tmp_path / "plain").rows] == [0]
    assert [row.file_offset for row in stream_pack.inspect(tmp_path / "turned").rows] == [None]
    assert [row.file_offset for row in stream_pack.inspect(tmp_path / "ragged").rows] == [0, 3 * 8]


def test_what_convert_refuses_is_listed_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it will drop these
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"q": quantized, "w": torch.ones(2), "s": torch.eye(2).to_sparse()}, tmp_path / "model.pt")
    found = stream_pack.inspect(tmp_path / "model.pt")
    assert [row.name for row in found.rows] == ["w"]
    assert [(one.name, one.error) for one in found.refused] == [
        ("q", "UnsupportedTensorError"),
        ("s", "UnsupportedTensorError"),
    ]
    assert "qint8, per_tensor_affine" in found.refused[0].reason
    assert found.pack_nbytes is None
    with pytest.raises(SourceError) as refusal:
        stream_pack.convert(tmp_path / "model.pt", tmp_path / "out.pack")
    assert found.refusal == str(refusal.value)
    assert main(["inspect", str(tmp_path / "model.pt")]) == 0
    out = capfd.readouterr().out
    assert "convert refuses q: tensor 'q' is quantized (qint8, per_tensor_affine): save x.dequantize()" in out
    assert "convert takes" not in out


def test_a_plan_that_convert_refuses_is_told(tmp_path: Path) -> None:
    row = torch.ones(1, 1000)
    torch.save({"w": row.expand(100_000, 1000)}, tmp_path / "model.pt")
    with pytest.raises(stream_pack.LimitError) as refusal:
        stream_pack.convert(tmp_path / "model.pt", tmp_path / "out.pack")
    found = stream_pack.inspect(tmp_path / "model.pt")
    assert found.refusal == str(refusal.value)
    assert f"convert refuses it: {refusal.value}" in found.to_text()


def test_key_and_ignore_unknown_choose_as_in_convert(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nested.pt"
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(3)}}, path)
    assert [row.shape for row in stream_pack.inspect(path).rows] == [(2,)]
    assert [row.shape for row in stream_pack.inspect(path, key="ema").rows] == [(3,)]
    assert main(["inspect", str(path), "--key", ".", "--json"]) == 0
    assert [row["name"] for row in json.loads(capfd.readouterr().out)["rows"]] == ["model.w", "ema.w"]
    with pytest.raises(UnsupportedCheckpointError):
        stream_pack.inspect(path, key="missing")
    with pytest.raises(OptionError):
        stream_pack.inspect(in_safetensors(tmp_path), key="model")
    stream_pack.save_file({"w": torch.ones(2)}, tmp_path / "a.pack")
    with pytest.raises(OptionError):
        stream_pack.inspect(tmp_path / "a.pack", key="model")


def test_a_checkpoint_inside_a_file_is_found_at_its_offset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = in_safetensors(tmp_path).read_bytes()
    (tmp_path / "both").write_bytes(bytes(100) + data)
    assert main(["inspect", str(tmp_path / "both"), "--offset", "100", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["nbytes"] == len(data)
    for row in found["rows"]:
        assert data[row["file_offset"] or 0 :][: row["nbytes"]] == as_bytes(state()[row["name"]])


@pytest.mark.parametrize("format", ["zip", "legacy", "safetensors"])
def test_of_a_pipe_only_the_head_is_read(format: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    tensors = {"w": torch.ones(10_000), "b": torch.ones(2)}
    if format == "safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=format == "zip")
    reading, writing = os.pipe()
    os.write(writing, path.read_bytes()[:30_000])
    os.close(writing)  # what reads on finds that the source was cut
    found = stream_pack.inspect(reading)
    os.close(reading)
    assert [row.name for row in found.rows] == [row.name for row in stream_pack.inspect(path).rows]
    assert {row.file_offset for row in found.rows} == {None}
    assert (found.nbytes, found.files, found.parts) == (None, (), ())


def test_a_pack_from_a_pipe_is_inspected_but_for_its_root(tmp_path: Path) -> None:
    stream_pack.save_file(state(), tmp_path / "a.pack", metadata={"made by": "me"})
    whole = stream_pack.inspect(tmp_path / "a.pack")
    reading, writing = os.pipe()
    data = (tmp_path / "a.pack").read_bytes()
    assert whole.rows[0].file_offset is not None
    os.write(writing, data[: whole.rows[0].file_offset])
    os.close(writing)
    found = stream_pack.inspect(reading)
    os.close(reading)
    assert found.rows == whole.rows
    assert found.parts == whole.parts
    assert (found.metadata, found.nbytes, found.checksum) == (whole.metadata, whole.nbytes, None)


def test_stdin_is_called_by_its_sign(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "stream_pack", "inspect", "-", "--json"]
    with open(in_zip(tmp_path), "rb") as file:
        done = subprocess.run(argv, stdin=file, capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert (found["path"], found["kind"], found["tensors"]) == ("-", "torch zip", 5)
    done = subprocess.run(argv, input=b"<!DOCTYPE html><html>", capture_output=True)
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"] == "UnsupportedCheckpointError"
    assert done.stderr.startswith(b"stream-pack: error: stdin: ")


def test_tensors_in_memory_are_inspected() -> None:
    found = stream_pack.inspect(state())
    assert (found.path, found.kind, found.nbytes) == ("", "tensors in memory", None)
    assert [row.name for row in found.rows] == list(state())
    assert found.pack_nbytes is not None


# Under a mebibyte of a gibibyte


def large_state() -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.weight": torch.zeros(ROWS) for layer in range(LAYERS)}


def large_zip(folder: Path) -> Path:
    save_sparse(large_state(), folder / "model.pt")
    return folder / "model.pt"


def large_legacy(folder: Path) -> Path:
    save_sparse(large_state(), folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder / "model.pt"


def safetensors_file(path: Path, names: list[str]) -> Path:
    nbytes = 4 * ROWS
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [ROWS], "data_offsets": [k * nbytes, (k + 1) * nbytes]}
            for k, name in enumerate(names)
        }
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + nbytes * len(names))
    return path


def large_safetensors(folder: Path) -> Path:
    return safetensors_file(folder / "model.safetensors", list(large_state()))


def large_shards(folder: Path) -> Path:
    names = list(large_state())
    files = {name: f"{k // 8}.safetensors" for k, name in enumerate(names)}
    for file in set(files.values()):
        safetensors_file(folder / file, [name for name in names if files[name] == file])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def large_gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in large_state():
        writer.add_tensor_info(name, (ROWS,), np.dtype(np.float32), 4 * ROWS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + 4 * ROWS * LAYERS)
    return path


def large_dcp(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        save_distributed(large_state(), storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


LARGE = [
    large_zip,
    large_legacy,
    large_safetensors,
    large_shards,
    large_gguf,
    pytest.param(large_dcp, marks=pytest.mark.slow),  # torch writes it out
]


@needs_io
@pytest.mark.parametrize("make", LARGE)
def test_under_a_mebibyte_of_a_gibibyte_is_read(make: Callable[[Path], Path], tmp_path: Path) -> None:
    stream_pack.inspect(state())  # imports what every source needs
    stream_pack.inspect(in_zip(tmp_path))
    (tmp_path / "large").mkdir()
    path = make(tmp_path / "large")
    try:
        files = [path] if path.is_file() else list(path.iterdir())
        assert sum(file.stat().st_size for file in files) > 1 << 30
        before = nbytes_read()
        found = stream_pack.inspect(path)
        taken = nbytes_read() - before
    finally:
        for file in (tmp_path / "large").iterdir():
            file.unlink()
    assert len(found.rows) == LAYERS
    assert all(row.file_offset is not None for row in found.rows)
    assert taken < MIB
