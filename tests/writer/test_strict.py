"""Options without effect are warnings, and ``strict`` makes warnings errors, before the first byte is written."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack.cli import main
from stream_pack.errors import StrictError
from tests.sources.byte_sources import Dribble

Options: TypeAlias = Mapping[str, object]


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, path)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path / "t.pt", {"a": torch.ones(2), "b": torch.ones(3)})


def converted(source: object, folder: Path, **options: object) -> stream_pack.Report:
    return stream_pack.convert(source, folder / "pack", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "model.*=bf16"}, ["--dtype 'model.*=bf16'"]),
        ({"dtype": ["a=f16", "a=bf16", "f32"]}, ["--dtype 'a=bf16'"]),
        ({"exclude": "optimizer.*", "rename": r"s/^module\.//"}, ["--exclude 'optimizer.*'", "--rename 's/^module"]),
        ({"include": ["a", "w", "v"]}, ["--include 'w'", "--include 'v'"]),
        ({"exclude": "a", "dtype": "a=bf16"}, ["--dtype 'a=bf16'"]),
    ],
)
def test_each_rule_without_effect_is_a_warning_of_report_and_forecast(
    options: Options, named: list[str], source: Path, tmp_path: Path
) -> None:
    warnings = converted(source, tmp_path, **options).warnings
    assert [warning.startswith(name) for warning, name in zip(warnings, named, strict=True)] == [True] * len(named)
    assert stream_pack.forecast(source, **options).warnings == warnings  # type: ignore[arg-type]
    assert converted(Dribble(source.read_bytes(), step=1000), tmp_path, **options).warnings == warnings


def test_options_that_all_have_an_effect_give_no_warning(source: Path, tmp_path: Path) -> None:
    report = converted(
        source, tmp_path, include=["a", "b"], exclude="b", rename=["s/a/w/", str.upper], dtype=["a=bf16"], strict=True
    )
    assert report.warnings == ()
    assert list(stream_pack.open(tmp_path / "pack")) == ["W"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32", "float64"])
def test_float8_is_cast_by_a_rule_with_its_name(dtype: str, target: str, tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(getattr(torch, dtype))
    source = saved(tmp_path / "t.pt", {"w": every, "v": every})
    report = converted(source, tmp_path, dtype=f"w={target}", strict=True)
    packed = stream_pack.load_file(tmp_path / "pack")
    assert packed["w"].dtype == getattr(torch, target)
    numbers = ~every.float().isnan()
    assert torch.equal(packed["w"].double()[numbers], every.double()[numbers])  # exactly
    assert packed["w"][~numbers].isnan().all()
    assert torch.equal(packed["v"].view(torch.uint8), every.view(torch.uint8))
    assert report.casts == {f"{dtype} -> {target}": 1}


def test_a_rule_for_all_that_rounds_only_the_scales_of_float8_is_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "d.safetensors"
    tensors = {"w": torch.ones(8, 8).to(torch.float8_e4m3fn), "w_scale_inv": torch.tensor([[0.1234567]])}
    tensors["norm"] = torch.ones(3)
    safetensors.torch.save_file(tensors, source)
    (warning,) = converted(source, tmp_path, dtype="bf16").warnings
    assert "'w_scale_inv'" in warning
    assert "'*scale*=keep'" in warning
    # What it advises:
    assert converted(source, tmp_path, dtype=["*scale*=keep", "bf16"]).warnings == ()
    kept = stream_pack.load_file(tmp_path / "pack")
    assert kept["w"].dtype == torch.float8_e4m3fn
    assert torch.equal(kept["w_scale_inv"], tensors["w_scale_inv"])
    assert converted(source, tmp_path, dtype="*=bf16").warnings == ()
    both = stream_pack.load_file(tmp_path / "pack")
    assert both["w"].dtype == both["w_scale_inv"].dtype == torch.bfloat16


def test_quantised_tensors_are_called_what_their_file_calls_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.q", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.norm", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (warning,) = converted(tmp_path / "m.gguf", tmp_path, dtype=["*.q=f16", "bf16"]).warnings
    assert warning == "--dtype '*.q=f16' (dtype=) cannot apply to Q8_0: only floats are cast"
    # A pack of it still knows.
    again = stream_pack.convert(tmp_path / "pack", io.BytesIO(), dtype="*.q=f16")
    assert again.warnings == (warning,)


def test_strict_refuses_before_the_first_byte_and_leaves_the_target(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    target.write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StrictError) as caught:
        converted(source, tmp_path, exclude=["x", "y"], strict=True)
    assert [warning[:13] for warning in caught.value.warnings] == ["--exclude 'x'", "--exclude 'y'"]
    assert str(caught.value).startswith("2 warnings, which --strict (strict=True) makes errors: --exclude 'x'")
    assert pickle.loads(pickle.dumps(caught.value)).warnings == caught.value.warnings
    assert target.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("way", ["stream", "forecast", "save_file"])
def test_strict_holds_wherever_a_pack_is_written_or_planned(way: str, source: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    calls: dict[str, Callable[[], object]] = {
        "stream": lambda: stream_pack.convert(source, stream, dtype="x=f16", strict=True),
        "forecast": lambda: stream_pack.forecast(source, dtype="x=f16", strict=True),
        "save_file": lambda: stream_pack.save_file({"a": np.ones(2)}, tmp_path / "p", dtype="x=f16", strict=True),
    }
    with pytest.raises(StrictError, match="1 warning, which"):
        calls[way]()
    assert stream.getvalue() == b""
    assert not (tmp_path / "p").exists()


def test_remarks_are_no_warnings(tmp_path: Path) -> None:
    nested = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}
    torch.save(nested, tmp_path / "nested.pt")
    report = converted(tmp_path / "nested.pt", tmp_path, strict=True)
    assert report.remarks
    assert report.warnings == ()


@pytest.mark.parametrize("extra", [[], ["--dry-run"], ["--quiet"], ["--dry-run", "--json"]])
def test_the_command_exits_3_and_names_each_rule(
    extra: list[str], source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "pack")
    argv = ["convert", str(source), target, *extra, "--exclude", "optimizer.*", "--rename", "s/x/y/", "--strict"]
    assert main(argv) == 3
    said = capfd.readouterr().err
    assert "2 warnings, which --strict" in said
    assert "--exclude 'optimizer.*'" in said
    assert "--rename 's/x/y/'" in said
    assert not os.path.exists(target)
    assert main([word for word in argv if word != "--strict"]) == 0
    out, said = capfd.readouterr()
    assert said.count("warning: --") == 2
    if "--json" in extra:
        assert len(json.loads(out)["warnings"]) == 2


def test_what_only_the_target_can_tell_is_refused_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "pack"
    target.write_bytes(b"old")
    monkeypatch.setattr("stream_pack.writer.sink.take_over", lambda file, path, old: ("attributes are lost",))
    with pytest.raises(StrictError, match="1 warning, which .*: attributes are lost; nothing was written"):
        converted(source, tmp_path, strict=True)
    assert target.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["pack", "t.pt"]
    assert converted(source, tmp_path).warnings == ("attributes are lost",)
