"""Safetensors files, held against the safetensors package byte for byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.errors import LimitError, UnsupportedTensorError
from stream_pack.extraction import safetensors as extracted
from stream_pack.format.dtypes import DTYPES

TORCH_DTYPES = [
    found
    for dtype in DTYPES
    if dtype.safetensors is not None
    and not dtype.torch_pairs
    and isinstance(found := getattr(torch, dtype.torch or "", None), torch.dtype)
]


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(TORCH_DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.one_of(st.just({}), st.dictionaries(st.just("format"), st.text(st.characters(exclude_categories=["Cs"])))),
)
def test_ordered_by_name_the_bytes_are_those_of_the_package(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[torch.dtype, list[int]]],
    metadata: dict[str, str],
) -> None:
    folder = tmp_path_factory.mktemp("s")
    given = {name: made(dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
    safetensors.torch.save_file(given, folder / "theirs", metadata=metadata or {"format": "pt"})
    stream_pack.save_file(given, folder / "pack", metadata=metadata)
    stream_pack.extract(folder / "pack", folder / "ours", to="safetensors", order="name")
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def header_of(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    (nbytes,) = struct.unpack_from("<Q", data)
    header: dict[str, object] = json.loads(data[8 : 8 + nbytes])
    return header


def test_tensors_stay_in_their_order_but_for_dtypes_whose_elements_are_longer(tmp_path: Path) -> None:
    tensors = {"z": torch.ones(1), "b": torch.ones(3, dtype=torch.uint8), "a": torch.ones(2), "l": torch.ones(1).long()}
    stream_pack.save_file(tensors, tmp_path / "pack")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors")
    assert list(header_of(tmp_path / "o.safetensors")) == ["__metadata__", "l", "z", "a", "b"]


def test_metadata_of_the_source_is_kept_and_can_be_added_to(tmp_path: Path) -> None:
    stream_pack.save_file({"w": torch.ones(1)}, tmp_path / "pack", metadata={"a": "1", "b": "2"})
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors", metadata={"b": "3", "c": "é"})
    with safetensors.safe_open(tmp_path / "o.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "1", "b": "3", "c": "é"}


def test_tied_tensors_are_written_twice_or_the_later_ones_dropped(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    tensors = {"w": w, "tied": w, "turned": w.view(2, 3), "part": w[:3], "twin": w.clone(), "none": torch.empty(0)}
    stream_pack.save_file(tensors, tmp_path / "pack")
    report = stream_pack.extract(tmp_path / "pack", tmp_path / "all.safetensors")
    assert (report.tensors, report.dropped) == (6, ())
    found = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert {name: found[name].tolist() for name in tensors} == {name: t.tolist() for name, t in tensors.items()}
    report = stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors", tied="drop")
    assert (report.tensors, report.dropped) == (5, ("tied",))
    # Another shape, a part, and equal bytes by chance are other tensors.
    assert set(header_of(tmp_path / "o.safetensors")) == {*tensors, "__metadata__"} - {"tied"}


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    stream_pack.save_file({"__metadata__": torch.ones(1)}, tmp_path / "pack")
    with pytest.raises(UnsupportedTensorError, match="--rename"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors")
    stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors", rename="s/_//g")
    assert set(safetensors.torch.load_file(tmp_path / "o.safetensors")) == {"metadata"}


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    stream_pack.save_file({"c": torch.ones(1, dtype=torch.complex128)}, tmp_path / "pack")
    with pytest.raises(UnsupportedTensorError, match="complex128, which safetensors does not have"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors")


def test_a_header_that_no_reader_takes_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extracted, "MAX_SAFETENSORS_HEADER_NBYTES", 200)
    tensors = {f"t{k}": torch.ones(1) for k in range(9)}
    stream_pack.save_file(tensors, tmp_path / "pack")
    with pytest.raises(LimitError, match="9 tensors would have .* bytes: .*--max-shard-size"):
        stream_pack.extract(tmp_path / "pack", tmp_path / "o.safetensors")
    report = stream_pack.extract(tmp_path / "pack", tmp_path / "folder", max_shard_nbytes=8)
    assert len(report.files) == 5
