"""What a pack was made of comes out again, whatever it was, and in a form that its own library reads."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack.errors import (
    LimitError,
    OptionError,
    SourceError,
    StreamPackError,
    StrictError,
    TruncatedSourceError,
    UnknownTensorError,
    UnsupportedTensorError,
)
from tests.sources.byte_sources import Dribble
from tests.support.kinds import FULL, KINDS, PLAIN, Made, bits, equal
from tests.support.spools import on_disk
from tests.support.torch_zips import saved
from tests.writer.test_pack import ScriptedSource

LOADERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "safetensors": lambda path: safetensors.torch.load_file(path),
    "torch": lambda path: torch.load(path, weights_only=True, mmap=True),
}


@pytest.mark.parametrize("form", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_extract_is_the_inverse_of_convert(kind: str, form: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source, wanted = KINDS[kind](tmp_path / "source")
    stream_pack.convert(source, tmp_path / "pack")
    for number, taken in enumerate((tmp_path / "pack", source)):
        target = tmp_path / f"{number}.{form}"
        report = stream_pack.extract(taken, target, to=form)  # type: ignore[arg-type]
        assert equal(LOADERS[form](target), wanted)
        assert (report.to, report.tensors, report.nbytes) == (form, len(wanted), target.stat().st_size)


@pytest.mark.parametrize("form", ["safetensors", "torch", "npz", "raw"])
@pytest.mark.parametrize("waiting", ["in memory", "on disk"])
@pytest.mark.parametrize("step", [1, 4096])
def test_a_stream_gets_the_bytes_of_the_file(form: str, waiting: str, step: int, tmp_path: Path) -> None:
    tensors = {name: t for name, t in FULL.items() if t.dtype not in (torch.bfloat16, torch.float8_e4m3fn)}
    data = saved(tensors)
    (tmp_path / "source").write_bytes(data)
    stream_pack.extract(tmp_path / "source", tmp_path / "file", to=form)  # type: ignore[arg-type]
    wanted = (tmp_path / "file").read_bytes()
    stream_pack.extract(Dribble(data, step=step), tmp_path / "from pipe", to=form)  # type: ignore[arg-type]
    assert (tmp_path / "from pipe").read_bytes() == wanted
    for source in (tmp_path / "source", Dribble(data, step=step)):
        target = io.BytesIO()
        if waiting == "on disk":
            with on_disk():
                stream_pack.extract(source, target, to=form, spool_dir=tmp_path)  # type: ignore[arg-type]
        else:
            stream_pack.extract(source, target, to=form)  # type: ignore[arg-type]
        assert target.getvalue() == wanted


@pytest.mark.parametrize("jobs", [1, 2, 4])
@pytest.mark.parametrize("chunk_nbytes", [7, 64, 1 << 20])
def test_the_bytes_depend_on_neither_threads_nor_chunks(jobs: int, chunk_nbytes: int, tmp_path: Path) -> None:
    stream_pack.save_file(FULL, tmp_path / "pack")
    for form in ("safetensors", "torch"):
        stream_pack.extract(tmp_path / "pack", tmp_path / f"a.{form}", to=form)
        stream_pack.extract(
            tmp_path / "pack",
            tmp_path / f"b.{form}",
            to=form,
            jobs=jobs,
            chunk_nbytes=chunk_nbytes,
        )
        assert (tmp_path / f"a.{form}").read_bytes() == (tmp_path / f"b.{form}").read_bytes()


def test_names_and_patterns_and_casts_choose_as_in_convert(tmp_path: Path) -> None:
    stream_pack.save_file({"a*": torch.ones(2), "ab": torch.zeros(3), "c": torch.ones(1)}, tmp_path / "pack")
    target = tmp_path / "o.safetensors"
    stream_pack.extract(tmp_path / "pack", target, names="a*")
    assert set(safetensors.torch.load_file(target)) == {"a*"}  # a name, not a pattern
    stream_pack.extract(tmp_path / "pack", target, include="a*", exclude="ab", rename="s/a/b/", dtype="bf16")
    found = safetensors.torch.load_file(target)
    assert (set(found), found["b*"].dtype) == ({"b*"}, torch.bfloat16)
    with pytest.raises(UnknownTensorError, match=r"no tensor 'd', 'e'; its 3 tensors: 'a\*', 'ab', 'c'") as caught:
        stream_pack.extract(tmp_path / "pack", target, names=["c", "e", "d"])
    assert caught.value.tensor == "d"
    with pytest.raises(OptionError, match="names and include"):
        stream_pack.extract(tmp_path / "pack", target, names="c", include="a*")
    assert set(safetensors.torch.load_file(target)) == {"b*"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "onnx"}, "to='onnx': expected 'safetensors', 'torch', 'npy'"),
        ({"to": "torch", "tied": "no"}, "tied='no': expected 'duplicate' or 'drop'"),
        ({"to": "torch", "max_shard_nbytes": 5}, "a folder can be written as safetensors only"),
        ({"max_shard_nbytes": 0}, "max_shard_nbytes=0"),
        ({"to": "torch", "names": [1]}, "names=<list>: expected a name"),
        ({}, "choose one with --to"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    options: dict[str, object], words: str, tmp_path: Path
) -> None:
    stream_pack.save_file(PLAIN, tmp_path / "pack")
    with pytest.raises(StreamPackError, match=words):
        stream_pack.extract(tmp_path / "pack", tmp_path / "out", **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["pack"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "npz", "raw"])
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([(0, b"abcd"), (1, b"ab")], TruncatedSourceError),
        ([(0, b"abcd")], TruncatedSourceError),
        ([(0, b"abcde"), (1, b"abcd")], SourceError),
        ([(1, b"abcd"), (0, b"ab"), (0, b"abc")], SourceError),
    ],
)
def test_a_source_of_too_few_or_too_many_bytes_leaves_the_target_alone(
    form: str, script: list[tuple[int, bytes]], error: type[StreamPackError], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.write_text("before")
    with pytest.raises(error, match="'[ab]'"):
        stream_pack.extract(ScriptedSource({"a": 4, "b": 4}, script), target, to=form)  # type: ignore[arg-type]
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["out"]


def test_a_damaged_pack_is_not_extracted(tmp_path: Path) -> None:
    stream_pack.save_file({"w": torch.arange(5000.0)}, tmp_path / "pack")
    data = bytearray((tmp_path / "pack").read_bytes())
    at = bytes(data).index(bits(torch.arange(100.0, 200.0)))
    data[at] ^= 1
    (tmp_path / "pack").write_bytes(data)
    with pytest.raises(StreamPackError, match="'w'"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "w.npy")
    assert os.listdir(tmp_path) == ["pack"]


def test_expanded_tensors_are_written_out_only_if_that_is_asked_for(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 20)}, tmp_path / "m.pt")
    for form in ("safetensors", "torch", "npy"):
        with pytest.raises(LimitError, match="--allow-blowup"):
            stream_pack.extract(tmp_path / "m.pt", tmp_path / "out", to=form)
        stream_pack.extract(tmp_path / "m.pt", tmp_path / "out", to=form, allow_blowup=True)
        assert (tmp_path / "out").stat().st_size > 4 << 20


def test_what_a_format_has_no_place_for_is_a_warning_or_an_error_under_strict(tmp_path: Path) -> None:
    stream_pack.save_file(PLAIN, tmp_path / "pack", metadata={"author": "me"})
    assert stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors").warnings == ()
    report = stream_pack.extract(tmp_path / "pack", tmp_path / "o.pt")
    assert report.warnings == ("the metadata 'author' of the source has no place in torch",)
    with pytest.raises(StrictError, match="author"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "strict.pt", strict=True)
    assert not (tmp_path / "strict.pt").exists()


@pytest.mark.parametrize("form", ["safetensors", "torch", "npz", "raw"])
@pytest.mark.parametrize("to_stream", [False, True])
def test_the_forecast_says_what_the_report_says(form: str, to_stream: bool, tmp_path: Path) -> None:
    tensors = {name: t for name, t in FULL.items() if t.dtype not in (torch.bfloat16, torch.float8_e4m3fn)}
    data = saved(tensors)
    target = tmp_path / "out"
    place = None if to_stream else target
    with on_disk():
        forecast = stream_pack.forecast_extract(Dribble(data, step=999), place, to=form)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == []
        report = stream_pack.extract(
            Dribble(data, step=999),
            io.BytesIO() if to_stream else target,
            to=form,  # type: ignore[arg-type]
            spool_dir=tmp_path,
        )
    told = {"source_kind", "to", "tensors", "nbytes", "files", "dropped", "warnings", "remarks", "copied"}
    assert {name: getattr(forecast, name) for name in told} == {name: getattr(report, name) for name in told}
    assert report.spool_nbytes <= forecast.spool_nbytes
    assert forecast.peak_memory_nbytes > 1 << 20


def run(*argv: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "stream_pack", *map(str, argv)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    stream_pack.save_file({"net.0.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, tmp_path / "m.pack")
    return tmp_path / "m.pack"


def test_one_tensor_goes_to_stdout_for_numpy(pack: Path) -> None:
    done = run("extract", pack, "net.0.weight", "-o", "-", "--to", "npy")
    assert done.returncode == 0
    assert np.load(io.BytesIO(done.stdout)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert done.stderr.startswith(b"stream-pack: stdout: 1 tensor, 152 B of npy, ")


def test_a_pipe_of_convert_and_extract_is_the_format_s_own_file(tmp_path: Path) -> None:
    safetensors.torch.save_file(PLAIN, tmp_path / "m.safetensors", metadata={"format": "pt"})
    packed = run("convert", "--order", "name", "-", "-", stdin=(tmp_path / "m.safetensors").read_bytes())
    done = run("extract", "-", "--to", "safetensors", "--order", "name", "-o", "-", "-q", stdin=packed.stdout)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (tmp_path / "m.safetensors").read_bytes()


def test_the_command_says_in_json_what_it_did(pack: Path, tmp_path: Path) -> None:
    done = run("extract", pack, "-o", tmp_path / "o.pt", "--json", "-q")
    said = json.loads(done.stdout)
    assert said["target"] == str(tmp_path / "o.pt")
    assert said["files"] == [{"name": str(tmp_path / "o.pt"), "nbytes": (tmp_path / "o.pt").stat().st_size}]
    done = run("extract", pack, "-o", tmp_path / "dry.pt", "--dry-run")
    assert not (tmp_path / "dry.pt").exists()
    assert f"{said['nbytes']}" in done.stdout.decode()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-o", "{}/o.onnx"], 2, "choose one with --to"),
        (["-o", "{}/o.npy"], 3, "name one, or extract --to npz"),
        (["x", "-o", "{}/o.npy"], 3, "no tensor 'x'"),
        (["-o", ""], 2, "OUT is empty"),
        (["-o", "s3://b/o.npy"], 2, "OUT is a URL"),
        ([], 2, "-o"),
    ],
)
def test_what_cannot_be_done_is_said_with_a_documented_code(
    words: list[str], code: int, said: str, pack: Path, tmp_path: Path
) -> None:
    done = run("extract", pack, *(word.format(tmp_path) for word in words))
    assert (done.returncode, done.stdout) == (code, b"")
    assert said in done.stderr.decode()
    assert os.listdir(tmp_path) == ["m.pack"]


def test_dtypes_that_a_format_lacks_are_refused_with_the_way_out(tmp_path: Path) -> None:
    made: Made = KINDS["pack"](tmp_path)
    with pytest.raises(UnsupportedTensorError, match=r"'bf16' \(and 1 more\) is bfloat16, which NumPy.*--dtype f32"):
        stream_pack.extract(made[0], tmp_path / "o.npz")
    stream_pack.extract(made[0], tmp_path / "o.npz", dtype="*=f32", exclude=["f8"])
    assert np.load(tmp_path / "o.npz")["bf16"].tolist() == [0, 1, 2, 3]
