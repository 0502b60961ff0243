"""Views of one storage that share some of its bytes are each read from the right place in a file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import stream_pack


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_view_near_the_end_of_a_storage_that_was_just_read(old: bool, jobs: int, tmp_path: Path) -> None:
    w = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    tensors = {"a": w[:95_000], "b": w[90_001:], "c": w[99_001:], "d": w[17:90_000]}
    torch.save(tensors, tmp_path / "model.pt", _use_new_zipfile_serialization=not old)
    target = io.BytesIO()
    stream_pack.convert(tmp_path / "model.pt", target, jobs=jobs)
    (tmp_path / "pack").write_bytes(target.getvalue())
    with stream_pack.open(tmp_path / "pack") as pack:
        for name, tensor in tensors.items():
            assert torch.equal(pack[name].torch(), tensor), name
