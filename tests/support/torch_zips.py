"""torch.save archives in memory: as torch writes them, and packed again in other ways."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.support.zips import Member, archive

__all__ = ["as_torch_has_it", "records", "repacked", "saved"]


def saved(value: object, **options: Any) -> bytes:
    """What ``torch.save`` writes into a stream."""
    target = io.BytesIO()
    torch.save(value, target, **options)
    return target.getvalue()


def as_torch_has_it(tensor: torch.Tensor) -> bytes:
    """The tensor's elements, row-major and little-endian, bits resolved."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def records(data: bytes) -> dict[str, bytes]:
    """The archive's records in order, without their prefix."""
    with zipfile.ZipFile(io.BytesIO(data)) as made:
        return {info.filename.partition("/")[2]: made.read(info) for info in made.infolist()}


def repacked(
    parts: dict[str, bytes] | Iterable[tuple[str, bytes]], change: Callable[[Member], Member] = lambda member: member
) -> bytes:
    """An archive of these records, each changed first."""
    pairs = parts.items() if isinstance(parts, dict) else parts
    return archive(change(Member(f"archive/{name}", data, streamed=len(data) > 0)) for name, data in pairs)
