"""Messages stay short and on one line, whatever a pack calls its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack import Pack
from stream_pack.metal.plan import plan_metal
from tests.support.packs import pack_bytes

NAMES = ("n" * 1_000_000, "\U000f0000" * 500_000, "\x1b[31m\n" * 200_000)
MAX_CHARACTERS = 4000
"""Three names, each cut to 400 characters, and what is said of them."""


def unsliceable(pack: Pack, name: str) -> object:
    return pack[name][:, :1]


def unknown(pack: Pack, name: str) -> object:
    return pack[f"no {name}"]


def in_use(pack: Pack, name: str) -> None:
    kept = [view.numpy() for view in pack.values()]
    pack.close()
    del kept


def damaged(pack: Pack, name: str) -> None:
    changed = bytearray(Path(pack.path).read_bytes())
    changed[pack[name].file_offset] ^= 1
    Path(pack.path).write_bytes(changed)
    stream_pack.open(pack.path, verify="full")


@pytest.mark.parametrize("act", [unsliceable, unknown, in_use, damaged])
@pytest.mark.parametrize("name", NAMES, ids=["long", "wide", "escapes"])
def test_an_error_stays_short_whatever_a_tensor_is_called(
    act: Callable[[Pack, str], object], name: str, tmp_path: Path
) -> None:
    pack_bytes(tmp_path / "pack", {other + name: torch.zeros(2, 2) for other in ("", "a", "b")})
    with stream_pack.open(tmp_path / "pack") as pack:
        with pytest.raises(stream_pack.StreamPackError if act is not unsliceable else IndexError) as caught:
            act(pack, name)
        message = str(caught.value)
    assert len(message) < MAX_CHARACTERS
    assert message.isprintable()


@pytest.mark.parametrize("name", NAMES, ids=["long", "wide", "escapes"])
def test_what_is_said_of_a_pack_for_metal_stays_short(name: str, tmp_path: Path) -> None:
    pack_bytes(tmp_path / "pack", {name: torch.zeros(2, 2, dtype=torch.float64)})
    with stream_pack.open(tmp_path / "pack") as pack:
        warnings = plan_metal(pack).warnings
        assert repr(pack[name]).isprintable()
        assert len(repr(pack[name])) < MAX_CHARACTERS
    assert warnings
    for warning in warnings:
        assert len(warning) < MAX_CHARACTERS
        assert warning.isprintable()
