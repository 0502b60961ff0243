"""The options of a conversion have one home: every public function that takes some shows the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack.errors import LimitError, OptionError
from stream_pack.executorch import build_mps_payload, build_xnnpack_payload
from stream_pack.writer.options import ConvertOptions

OPTIONS = {field.name: field.default for field in fields(ConvertOptions) if field.init}
OTHERS = {"source", "target", "to_stream", "tensors", "path", "graph", "constants", "names"}


@pytest.mark.parametrize(
    "function",
    [stream_pack.convert, stream_pack.forecast, stream_pack.save_file, build_mps_payload, build_xnnpack_payload],
)
def test_every_signature_shows_the_defaults_of_the_options(function: Callable[..., object]) -> None:
    shown = inspect.signature(function).parameters
    given = {name: shown[name].default for name in shown if name not in OTHERS}
    assert given == {name: OPTIONS[name] for name in given}
    assert len(given) > 6
    assert {shown[name].kind for name in given} == {inspect.Parameter.KEYWORD_ONLY}


def test_convert_has_every_option_and_a_forecast_those_that_plan() -> None:
    assert list(inspect.signature(stream_pack.convert).parameters)[2:] == list(OPTIONS)
    lacking = OPTIONS.keys() - inspect.signature(stream_pack.forecast).parameters
    assert lacking == {"spool_dir", "progress", "announce"}


@pytest.mark.parametrize("name", ["jobs", "chunk_nbytes", "block_nbytes", "max_memory"])
@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_a_number_of_another_type_is_refused_in_words(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name}={value!r}: expected a whole number"):
        ConvertOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["jobs", "chunk_nbytes"])
def test_a_number_below_its_least_is_a_limit(name: str) -> None:
    with pytest.raises(LimitError, match=f"{name}=0: expected at least 1") as caught:
        ConvertOptions(**{name: 0})  # type: ignore[arg-type]
    assert (caught.value.value, caught.value.limit) == (0, 1)


def test_what_is_wrong_with_an_option_is_said_before_the_target_is_touched(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="to='pte'"):
        stream_pack.save_file({"w": np.ones(3)}, tmp_path / "p", to="pte")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["to", "metadata", "alignment", "block_nbytes"])
@pytest.mark.parametrize("writer", [stream_pack.Writer, stream_pack.ParallelWriter])
def test_the_writers_refuse_options_of_another_type_as_convert_does(
    writer: Callable[..., object], name: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=f"{name}=1.5: expected"):
        writer(tmp_path / "p", {"w": ("float32", [3])}, **{name: 1.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["progress", "announce"])
def test_a_function_that_cannot_be_called_is_refused_before_anything_happens(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=5: expected a function"):
        ConvertOptions(**{name: 5})  # type: ignore[arg-type]


def test_what_is_wrong_with_an_option_is_shown_in_part() -> None:
    with pytest.raises(OptionError) as caught:
        ConvertOptions(metadata={"k": b"v" * 1_000_000})  # type: ignore[dict-item]
    assert len(str(caught.value)) < 300


def test_an_alignment_is_a_whole_number() -> None:
    with pytest.raises(OptionError, match="an alignment of '16K': expected a whole number"):
        stream_pack.Alignment(large="16K")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("allow_blowup", "no", "True or False"), ("ignore_unknown", 1, "True or False"), ("spool_dir", 5, "a path")],
)
def test_a_switch_or_folder_of_another_type_is_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(OptionError, match=f"{name}={value!r}: expected {expected}"):
        ConvertOptions(**{name: value})  # type: ignore[arg-type]
