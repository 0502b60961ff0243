"""Long lists: folded into patterns that spell exactly their names, sorted, cut, and filtered."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack import OptionError, SourceError
from stream_pack.cli import main
from stream_pack.inspection.folding import fold
from stream_pack.inspection.inspection import SCHEMA, InspectedTensor, Inspection

ROOT = Path(__file__).parent.parent.parent


def row(number: int, name: str, *, dtype: str = "float32", tied: int | None = None) -> InspectedTensor:
    return InspectedTensor(
        number=number, name=name, dtype=dtype, shape=(2,), nbytes=8, file=None, file_offset=None, buffer=number,
        shared_with=tied, inside=None, page_aligned=False, fault=None, dim_order=None, quantization=None, notes={},
    )  # fmt: skip


def patterns(*names: str) -> list[str]:
    return [line.name for line in fold([row(number, name) for number, name in enumerate(names)])]


def spelled(pattern: str) -> list[str]:
    """The names that a pattern stands for, as bash reads it."""
    words = re.split(r"\{(\d+)\.\.(\d+)\}", pattern)
    choices = [
        [words[k]] if k % 3 == 0 else [str(n) for n in range(int(words[k]), int(words[k + 1]) + 1)]
        for k in range(len(words))
        if k % 3 != 2
    ]
    return ["".join(parts) for parts in itertools.product(*choices)]


def test_layers_become_a_pattern_each_where_the_first_of_them_was() -> None:
    names = [f"layers.{n}.{part}" for n in range(32) for part in ("wq", "wk")]
    assert patterns("embed", *names, "norm") == ["embed", "layers.{0..31}.wq", "layers.{0..31}.wk", "norm"]


def test_experts_of_layers_are_one_pattern() -> None:
    assert patterns(*(f"h.{n}.experts.{m}.w1" for n in range(4) for m in range(8))) == ["h.{0..3}.experts.{0..7}.w1"]


def test_a_gap_ends_a_run_and_a_single_name_stays_a_name() -> None:
    assert patterns("h.0.w", "h.1.w", "h.3.w", "h.5.w", "h.6.w") == ["h.{0..1}.w", "h.3.w", "h.{5..6}.w"]


def test_numbers_that_zeros_lead_are_text() -> None:
    assert patterns("w.00", "w.01", "w.0", "w.1") == ["w.00", "w.01", "w.{0..1}"]


def test_only_what_is_alike_is_folded() -> None:
    lines = fold([row(0, "h.0"), row(1, "h.1"), row(2, "h.2", dtype="int32"), row(3, "h.3", tied=0), row(4, "h.4")])
    assert [line.name for line in lines] == ["h.{0..1}", "h.2", "h.3", "h.4"]


@given(st.sets(st.from_regex(r"(a|b){0,2}[0-9]{0,2}(\.[0-9]{1,2}){0,2}", fullmatch=True), max_size=40))
def test_the_patterns_spell_the_names_each_once(names: set[str]) -> None:
    rows = [row(number, name) for number, name in enumerate(sorted(names))]
    lines = fold(rows)
    assert sorted(name for line in lines for name in spelled(line.name)) == sorted(names)
    for line in lines:
        assert sorted(tensor.name for tensor in line.tensors) == sorted(spelled(line.name))


def test_names_of_a_megabyte_are_left_alone() -> None:
    names = ["1." * 500_000 + str(n) for n in range(3)]
    assert patterns(*names) == names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {f"layers.{n}.w": torch.ones(4) for n in range(12)} | {"big": torch.ones(100), "a": torch.ones(2)}
    torch.save(tensors, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def names_in(text: str) -> list[str]:
    table = text.partition("\n\n")[0].splitlines()[1:]
    return [line.split()[0] for line in table]


def test_tensors_are_sorted_and_the_list_is_cut(path: Path) -> None:
    found = stream_pack.inspect(path)
    assert names_in(found.to_text(sort="size"))[:2] == ["big", "layers.0.w"]
    assert names_in(found.to_text(sort="name"))[:3] == ["a", "big", "layers.0.w"]
    offsets = [(r.file_offset or 0, r.name) for r in found.rows]
    assert names_in(found.to_text(sort="offset")) == [name for _, name in sorted(offsets)]
    text = found.to_text(limit=3)
    assert "\n… 11 rows more\n" in text
    assert len(names_in(text)) == 4  # and the line that says so
    assert names_in(found.to_text(fold=True)) == ["layers.{0..11}.w", "big", "a"]
    assert "192" in found.to_text(fold=True).splitlines()[1]
    assert "12 x 16" in found.to_text(fold=True).splitlines()[1]
    with pytest.raises(OptionError, match="'size', 'name' or 'offset'"):
        found.to_text(sort="shape")  # type: ignore[arg-type]


def test_globs_choose_whole_names(path: Path) -> None:
    found = stream_pack.inspect(path)
    assert names_in(found.to_text(include="layers.1?.w")) == ["layers.10.w", "layers.11.w"]
    assert names_in(found.to_text(include=["a", "b*"])) == ["big", "a"]
    with pytest.raises(SourceError, match=r"no tensor matches 'layers'.*whole name.*'layers\.0\.w'"):
        found.to_text(include="layers")


def test_what_is_chosen_is_the_same_in_the_json(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["inspect", str(path), "--json", "--include", "layers.*", "--include", "big", "--sort", "size", "--limit"]
    assert main([*argv, "2"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tensors"] == 14
    assert [(row["number"], row["name"]) for row in found["rows"]] == [(12, "big"), (0, "layers.0.w")]
    assert main(["inspect", str(path), "--include", "none"]) == 3
    assert "no tensor matches" in capfd.readouterr().err


def on_a_terminal(*argv: str | Path) -> str:
    """What a command prints there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "stream_pack", *argv], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while data := os.read(ours, 4096):
                text += data
        except OSError:  # how Linux says that the other end is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    return text.decode().replace("\r\n", "\n")


def test_lists_are_folded_on_a_terminal_only(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert names_in(on_a_terminal("inspect", path)) == ["layers.{0..11}.w", "big", "a"]
    assert len(names_in(on_a_terminal("inspect", path, "--all"))) == 14
    assert main(["inspect", str(path)]) == 0
    assert len(names_in(capfd.readouterr().out)) == 14


# The JSON


def documented(section: str) -> set[str]:
    """The fields in the table below a heading of docs/json.md."""
    text = (ROOT / "docs" / "json.md").read_text()
    _, _, below = text.partition(f"\n## {section}\n")
    assert below, section
    return set(re.findall(r"^\| `(\w+)` \|", below.partition("\n## ")[0], re.MULTILINE))


def test_every_field_of_the_json_is_documented_and_no_other(path: Path) -> None:
    stream_pack.convert(path, path.with_name("a.pack"))
    for source in (path, path.with_name("a.pack")):
        found = json.loads(json.dumps(stream_pack.inspect(source).to_json()))
        assert found.keys() == documented("inspect")
        assert found["rows"][0].keys() == documented("inspect: a row")
    for heading, kind in (
        ("part", stream_pack.InspectedPart),
        ("file", stream_pack.InspectedFile),
        ("refused tensor", stream_pack.RefusedTensor),
        ("payload", stream_pack.InspectedPayload),
    ):
        assert {field.name for field in fields(kind)} == documented(f"inspect: a {heading}")
    assert f"`schema` is {SCHEMA}" in (ROOT / "docs" / "json.md").read_text()
    assert {field.name for field in fields(Inspection)} < documented("inspect")
