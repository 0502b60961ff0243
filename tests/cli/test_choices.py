"""The options of ``convert`` that choose: tensors, names, dtypes, order, memory; and ``--dry-run``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack.cli import main
from tests.test_contracts import loaded_by, run_module

WEIGHTS = {
    "module.w": torch.arange(600.0).reshape(20, 30),
    "module.norm": torch.tensor([1.0, 1e-40]),
    "ids": torch.arange(3),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(WEIGHTS, path)
    return path


def convert(source: Path, *options: str) -> dict[str, torch.Tensor]:
    target = source.with_suffix(".pack")
    assert main(["convert", "--quiet", str(source), str(target), *options]) == 0
    tensors = stream_pack.load_file(target)
    return {name: tensors[name] for name in tensors}


def test_tensors_are_taken_left_out_and_renamed(source: Path) -> None:
    packed = convert(
        source, "--include", "module.*", "--include", "ids", "--exclude", "*norm",
        "--rename", r"s/^module\.//", "--rename", "s/i/j/",
    )  # fmt: skip
    assert list(packed) == ["w", "jds"]
    assert torch.equal(packed["w"], WEIGHTS["module.w"])


def test_dtypes_are_set_by_the_first_rule_that_matches(source: Path) -> None:
    packed = convert(source, "--dtype", "*norm=f32", "--dtype", "bf16")
    assert torch.equal(packed["module.w"], WEIGHTS["module.w"].bfloat16())
    assert torch.equal(packed["module.norm"], WEIGHTS["module.norm"])
    assert torch.equal(packed["ids"], WEIGHTS["ids"])


@pytest.mark.parametrize(
    ("to", "begins"), [("mps", b"\0\0\0\0MP00"), ("xnnpack", b"\0\0\0\0XH00"), ("ptd", b"FT01FH01")]
)
def test_a_pack_can_be_made_for_a_delegate_or_a_runtime(source: Path, to: str, begins: bytes) -> None:
    packed = convert(source, "--to", to)
    assert begins in source.with_suffix(".pack").read_bytes()[:12]
    assert torch.equal(packed["module.w"], WEIGHTS["module.w"])
    again = source.with_name("again.pack")
    assert main(["convert", "--quiet", "--to", "mps", str(source.with_suffix(".pack")), str(again)]) == 0
    convert(source)
    assert again.read_bytes() == source.with_suffix(".pack").read_bytes()


def test_an_unknown_target_format_is_wrong_usage(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source.with_name("a")), "--to", "pte"]) == 2
    assert "invalid choice: 'pte'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--include", "w"], "--include"),
        (["--dtype", "bf16", "--order", "name", "--jobs", "2"], "--order, --dtype, --jobs"),
        (["--key", "model"], "--key"),
        (["--dry-run"], "--dry-run"),
        (["--strict"], "--strict"),
        (["--to", "ptd", "--metadata", "a=b"], "--to, --metadata"),
        (["--alignment", "4K", "--max-memory", "1G", "--allow-blowup"], "--max-memory, --alignment, --allow-blowup"),
    ],
)
def test_options_that_mean_nothing_beside_list_keys_are_refused(
    options: list[str], named: str, source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), "--list-keys", *options]) == 2
    said = capfd.readouterr().err
    assert "stream-pack: error: --list-keys only prints keys: " in said
    assert set(named.split(", ")) == {word.strip(",") for word in said.split() if word.startswith("--")} - {
        "--list-keys"
    }


def test_what_list_keys_heeds_may_stand_beside_it(source: Path, tmp_path: Path) -> None:
    words = ["convert", str(source), str(tmp_path / "pack"), "--list-keys", "--ignore-unknown", "--json", "--quiet"]
    assert main([*words, "--spool-dir", str(tmp_path)]) == 0
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("extra", [[], ["--key", "a"]])
def test_an_empty_key_is_wrong_usage(extra: list[str], source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), "--dry-run", "--key", "", *extra]) == (3 if extra else 2)
    assert ("is empty" in capfd.readouterr().err) is not bool(extra)


def test_one_key_of_metadata_with_two_values_is_wrong_usage(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), "--dry-run", "--metadata", "a=1", "--metadata", "a=2"]) == 2
    assert "--metadata 'a' is given twice" in capfd.readouterr().err
    assert main(["convert", str(source), "--dry-run", "--metadata", "a=1", "--metadata", "a=1"]) == 0


@pytest.mark.parametrize("verb", ["convert", "inspect", "verify", "metal-plan"])
def test_an_unknown_option_shows_the_usage_of_its_command(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "a", *(["b"] if verb == "convert" else []), "--bogus"]) == 2
    assert capfd.readouterr().err.startswith(f"usage: stream-pack {verb} ")


def test_keys_are_chosen_and_listed_in_a_checkpoint_inside_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inner = io.BytesIO()
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}, inner)
    outer = tmp_path / "outer"
    outer.write_bytes(b"HEAD" * 1024 + inner.getvalue())
    place = ["--offset", "4K"]
    assert main(["convert", str(outer), "--list-keys", *place]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["key", ".", "model", "ema"]
    assert main(["convert", str(outer), str(tmp_path / "pack"), "--key", "ema", *place]) == 0
    assert stream_pack.load_file(tmp_path / "pack")["w"].tolist() == [0, 0]


def test_tensors_can_be_sorted_by_name(source: Path) -> None:
    assert list(convert(source)) == ["module.w", "module.norm", "ids"]
    assert list(convert(source, "--order", "name")) == ["ids", "module.norm", "module.w"]


def test_casts_are_in_the_report(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source) + ".pack", "--dtype", "f16", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["casts"] == {"float32 -> float16": 2}
    assert main(["convert", str(source), str(source) + ".pack", "--dtype", "f16"]) == 0
    assert "2 float32 -> float16" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "int8"], ["--dtype", "w="], ["--rename", "a/b"], ["--rename", "s/(/b/"],
        ["--rename", r"s/w/\1/"], ["--order", "size"], ["--max-memory", "lots"],
    ],
)  # fmt: skip
def test_an_option_that_means_nothing_is_wrong_usage(
    options: list[str], source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = source.with_suffix(".pack")
    assert main(["convert", str(source), str(target), *options]) == 2
    assert "Traceback" not in capfd.readouterr().err
    assert not target.exists()


def test_patterns_that_leave_nothing_are_the_inputs_fault(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source) + ".pack", "--include", "w"]) == 3
    assert "'module.w'" in capfd.readouterr().err


def test_memory_that_cannot_be_enough_is_refused_at_once(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source) + ".pack", "--max-memory", "1M"]) == 3
    assert "needs at least" in capfd.readouterr().err
    assert not Path(str(source) + ".pack").exists()


def test_a_dry_run_prints_the_plan_and_writes_nothing(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(source.parent))
    target = source.with_suffix(".pack")
    assert main(["convert", "--dry-run", str(source), str(target), "--dtype", "*w=f16"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("3 tensors")
    assert "cast float32 -> float16: 1 tensor\n" in text
    assert "peak memory" in text
    assert sorted(os.listdir(source.parent)) == before


def test_a_dry_run_for_machines_predicts_the_length(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = source.with_suffix(".pack")
    assert main(["convert", "--dry-run", "--json", str(source), str(target)]) == 0
    plan = json.loads(capfd.readouterr().out)
    convert(source)
    assert plan["target_nbytes"] == target.stat().st_size


def test_a_dry_run_needs_only_the_head_of_a_pipe_and_leaves_stdout_alone() -> None:
    file = io.BytesIO()
    torch.save({"w": torch.zeros(1_000_000)}, file)
    head = file.getvalue()[:10_000]
    argv = [sys.executable, "-m", "stream_pack", "convert", "--dry-run", "-", "-"]
    result = subprocess.run(argv, input=head, capture_output=True, check=True)
    assert result.stdout.startswith(b"1 tensor")


def test_casting_to_bfloat16_does_not_load_torch(source: Path) -> None:
    loaded = loaded_by(*run_module("convert", "--quiet", "--dtype", "bf16", str(source), str(source) + ".pack"))
    assert "ml_dtypes" in loaded
    assert "torch" not in loaded


def test_a_dry_run_imports_what_a_cast_needs_so_that_its_memory_is_counted(source: Path) -> None:
    dry_run = ("convert", "--dry-run", str(source), "--dtype")
    assert "ml_dtypes" in loaded_by(*run_module(*dry_run, "bf16"))
    assert "ml_dtypes" not in loaded_by(*run_module(*dry_run, "f16"))


@pytest.mark.parametrize("where", [0, 1, 2])
def test_options_may_stand_anywhere(source: Path, where: int) -> None:
    target = source.with_suffix(".pack")
    words = [str(source), str(target)]
    words[where:where] = ["--quiet", "--dtype", "bf16"]
    assert main(["convert", *words]) == 0
    assert stream_pack.load_file(target)["module.w"].dtype == torch.bfloat16


def test_a_dry_run_needs_no_target(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--dry-run", str(source), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tensors"] == 3
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_disk_space_that_a_pipe_needs_is_announced_before_the_pack_begins(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"t": torch.arange(6_000_000.0).reshape(2000, 3000).t()}, buffer)
    argv = [sys.executable, "-m", "stream_pack", "convert", "-", str(tmp_path / "out")]
    done = subprocess.run(argv, input=buffer.getvalue(), capture_output=True, check=True)
    first, last = done.stderr.decode().splitlines()
    assert "using up to 22.9 MiB of disk space temporarily" in first
    assert str(tmp_path) in first
    assert "22.9 MiB spooled" in last
    done = subprocess.run([*argv, "--quiet"], input=buffer.getvalue(), capture_output=True, check=True)
    assert done.stderr == b""
