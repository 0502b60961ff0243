"""What a tensor costs beside its bytes, however small it is: memory while its pack is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.memory import measure, needs_proc

pytestmark = [needs_proc, pytest.mark.slow]

FEW, MANY = 100_000, 400_000
HEAD_NBYTES = 137
"""Index and graph of these tensors: 57 bytes of columns and 58 of the graph each, and the name."""

CONVERT = "import sys, stream_pack; stream_pack.convert(sys.argv[1], sys.argv[2])"


def name(number: int) -> str:
    return f"layers.{number // 8}.attn.w{number}"


def safetensors_of(count: int, path: Path) -> None:
    entries = {name(k): {"dtype": "F32", "shape": [2], "data_offsets": [8 * k, 8 * k + 8]} for k in range(count)}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8 * count))


def test_a_tensor_of_a_safetensors_file_takes_less_than_300_bytes_beyond_the_head(tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "a.pack"
    peaks = []
    for count in (FEW, MANY):
        safetensors_of(count, source)
        peaks.append(measure([sys.executable, "-c", CONVERT, source, target]).peak_anonymous_nbytes)
    assert (peaks[1] - peaks[0]) / (MANY - FEW) < HEAD_NBYTES + 300


MAKE = """
import sys, torch
tensors = {f"layers.{k // 8}.attn.w{k}": torch.full((16,), float(k)) for k in range(int(sys.argv[1]))}
"""
SAVE = MAKE + "import stream_pack; stream_pack.save_file(tensors, sys.argv[2])"


def test_a_tensor_in_memory_takes_less_than_700_bytes_more_while_it_is_saved(tmp_path: Path) -> None:
    def peak(program: str, count: int) -> int:
        return measure([sys.executable, "-c", program, str(count), tmp_path / "a.pack"]).peak_anonymous_nbytes

    tensors, saving = (peak(program, MANY) - peak(program, FEW) for program in (MAKE, SAVE))
    assert (saving - tensors) / (MANY - FEW) < 700
