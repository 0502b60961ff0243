"""A description names every tensor, and accounts for every byte of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.cli import main
from stream_pack.inspection.inspect import inspect_pack
from stream_pack.inspection.inspection import Inspection
from tests.support.packs import pack_bytes, places, tensors
from tests.vectors import minimal_reader


def described(path: Path) -> Inspection:
    with stream_pack.open(path) as pack:
        return inspect_pack(pack)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


def test_the_parts_are_where_the_format_says_and_fill_the_file(path: Path) -> None:
    # ET#7088, ET#17755, netron#1175
    data = pack_bytes(path)
    at = places(data)
    parts = {part.name: part.nbytes for part in described(path).parts}
    assert parts == {
        "header": 24,
        "graph": at.index - 24,
        "index": at.index_end - at.index,
        "head padding": at.locator - at.index_end,
        "locator": 48,
        "tensors": 96 * 32 * 4 + 14 + 8 + 3,
        "region padding": at.region_end - at.region - (96 * 32 * 4 + 14 + 8 + 3),
        "checksums": 8 * 6,
        "footer": 24,
    }
    assert sum(parts.values()) == len(data)


@given(lengths=st.lists(st.integers(0, 20_000), max_size=12), shared=st.booleans())
def test_the_parts_fill_any_file_exactly(
    lengths: list[int], shared: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("describe") / "pack"
    content = {str(number): torch.zeros(nbytes, dtype=torch.uint8) for number, nbytes in enumerate(lengths)}
    if shared:
        content.update({f"again {name}": tensor for name, tensor in content.items()})
    pack_bytes(path, content)
    description = described(path)
    assert sum(part.nbytes for part in description.parts) == description.nbytes == path.stat().st_size
    assert description.tensors_nbytes == sum(lengths) * (2 if shared else 1)


def test_rows_say_what_shares_bytes_and_what_can_be_a_metal_buffer(path: Path) -> None:
    pack_bytes(path)
    rows = {row.name: row for row in described(path).rows}
    assert list(rows) == list(tensors())
    numbers = {name: number for number, name in enumerate(rows)}
    assert rows["embed"].shared_with == numbers["head"]
    assert rows["head"].shared_with == numbers["embed"]
    assert rows["rows"].inside == numbers["embed"]
    assert rows["embed"].buffer == rows["head"].buffer == rows["rows"].buffer == 0
    assert (rows["norm"].buffer, rows["none"].buffer) == (1, None)
    assert (rows["norm"].shared_with, rows["norm"].inside) == (None, None)
    assert rows["embed"].page_aligned
    assert not rows["norm"].page_aligned
    lines = {line.split("  ")[0]: line for line in described(path).to_text().splitlines()}
    assert lines["embed"].endswith("  tied with head, page")
    assert lines["rows"].endswith("  in embed")
    assert lines["none"].split()[-1] == str(rows["none"].file_offset)
    for name, tensor in tensors().items():
        assert rows[name].shape == tuple(tensor.shape)
        assert rows[name].nbytes == tensor.nbytes
        assert f"torch.{rows[name].dtype}" == str(tensor.dtype)


def test_the_json_holds_everything_and_is_plain(path: Path) -> None:
    pack_bytes(path, metadata={"format": "pt"})
    decoded = json.loads(json.dumps(described(path).to_json()))
    assert decoded["tensors"] == 7
    assert decoded["nbytes"] == path.stat().st_size == sum(part["nbytes"] for part in decoded["parts"])
    assert decoded["metadata"] == {"format": "pt"}
    assert decoded["rows"][0]["name"] == "embed"
    assert decoded["rows"][0]["shape"] == [96, 32]
    assert decoded["alignment"] == [256, 16384]
    assert decoded["block_nbytes"] == 4096


def test_the_table_is_aligned_and_exact(path: Path) -> None:
    pack_bytes(path, metadata={"made by": "a\nb"})
    lines = described(path).to_text().splitlines()
    head, first, second = lines[:3]
    assert head.split() == ["name", "dtype", "shape", "nbytes", "file", "offset"]
    assert first.split() == ["embed", "float32", "[96,", "32]", "12288", "16384", "tied", "with", "head,", "page"]
    assert first.index("12288") + 5 == head.index("nbytes") + 6 == second.index(" 14 ") + 3
    assert f"{path.stat().st_size}" in "".join(line for line in lines if line.startswith("file "))
    assert "metadata made by = a\\nb" in lines


def test_control_characters_do_not_reach_the_terminal(path: Path) -> None:
    pack_bytes(path, {"a\n\x1b[31mred\u202e": torch.zeros(1), "é": torch.zeros(1)})
    text = described(path).to_text()
    assert "a\\n\\x1b[31mred\\u202e" in text
    assert "é" in text
    assert "\x1b" not in text


def test_names_that_a_model_has_are_cut_only_for_a_width(path: Path) -> None:
    name = "layer." * 20
    pack_bytes(path, {name: torch.zeros(2, 3)})
    assert name in described(path).to_text()
    for width in (80, 120):
        (row,) = [line for line in described(path).to_text(width).splitlines() if line.startswith("layer.")]
        assert len(row) <= width
        assert "…" in row
        assert row.split()[1:5] == ["float32", "[2,", "3]", "24"]


@pytest.mark.parametrize("character", ["n", "\x00", "\U000f0000"])
def test_a_very_long_name_comes_whole_once_in_the_json_and_cut_in_the_text(path: Path, character: str) -> None:
    name, tensor = character * 40_000, torch.zeros(4)
    pack_bytes(path, {name: tensor, **{str(n): tensor for n in range(300)}})
    description = described(path)
    assert len(description.to_text()) < 150_000  # 301 rows and some
    assert len(json.dumps(description.to_json())) < 12 * 40_000 + 150_000
    rows = description.rows
    assert rows[0].name == name
    assert [row.shared_with for row in rows[1:]] == [0] * 300
    lines = description.to_text().splitlines()
    shown = lines[1].split("  ")[0]
    assert len(shown) == 120
    assert shown.endswith("…")
    assert lines[2].endswith(f"  tied with {shown}, page")


def test_an_empty_pack_has_a_description(path: Path) -> None:
    pack_bytes(path, {})
    description = described(path)
    assert description.rows == ()
    assert "0 tensors" in description.to_text()
    assert sum(part.nbytes for part in description.parts) == path.stat().st_size


def test_the_root_checksum_is_that_of_the_file_as_a_foreign_reader_finds_it(path: Path) -> None:
    data = pack_bytes(path)
    expected = minimal_reader.read(data).root_checksum
    with stream_pack.open(path) as pack:
        assert pack.checksum == expected
        assert inspect_pack(pack).checksum == expected
    inspection = stream_pack.inspect(path)
    assert inspection.checksum == expected
    assert f"root checksum {expected:016x}" in inspection.to_text().splitlines()
    assert inspection.to_json()["checksum"] == f"{expected:016x}"


def test_the_library_says_what_the_command_prints(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pack_bytes(path, metadata={"format": "pt"})
    for before in (0, 16384):
        inside = path.with_name(f"at {before}")
        inside.write_bytes(bytes(before) + path.read_bytes())
        assert main(["inspect", str(inside), "--offset", str(before)]) == 0
        text = capfd.readouterr().out
        assert text == f"{stream_pack.inspect(inside, offset=before).to_text()}\n"
        assert "Metal: 1 window" in text
        assert main(["inspect", str(inside), "--offset", str(before), "--json"]) == 0
        found = stream_pack.inspect(inside, offset=before, nbytes=path.stat().st_size)
        assert json.loads(capfd.readouterr().out) == json.loads(json.dumps(found.to_json()))
