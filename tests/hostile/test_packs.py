"""Packs and payloads made to harm their reader: small files that would cost it much."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

import stream_pack
from stream_pack import FormatError
from tests.support.packs import LOCATOR, pack_bytes, places, reseal

_T = TypeVar("_T")

PAGE = 16384
# Bytes from the root table of a graph that this package writes to these fields.
CONSTANT_IDS, VALUES = 24, 12


def peak_of(call: Callable[[], _T]) -> tuple[_T, int]:
    """What it returns, and the most memory that NumPy and Python had for it."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def graph_of_many_ids(graph: bytes, count: int) -> bytes:
    """The graph of one tensor with ``count`` values, all but one broken, and as many constant ids, all 0."""
    data = bytearray(graph)
    data += bytes(-len(data) % 8)
    (root,) = struct.unpack_from("<I", data)
    field = root + VALUES
    values = field + struct.unpack_from("<I", data, field)[0]
    value = values + 4 + struct.unpack_from("<I", data, values + 4)[0]
    table = bytearray(data[value : value + 64])
    # Offsets lead forward only: ids, then values, then a copy of the one table.
    ids, new_values = len(data), len(data) + 4 + 4 * count
    position = -(-(new_values + 4 + 4 * count) // 8) * 8
    struct.pack_into("<i", table, 0, struct.unpack_from("<i", data, value)[0] + position - value)
    struct.pack_into("<I", data, root + CONSTANT_IDS, ids - (root + CONSTANT_IDS))
    struct.pack_into("<I", data, field, new_values - field)
    data += struct.pack("<I", count) + bytes(4 * count)
    data += struct.pack("<II", count, position - (new_values + 4)) + bytes(4 * (count - 1))
    data += bytes(position - len(data)) + table
    return bytes(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


def write_pack_of_many_ids(path: Path, count: int) -> None:
    data = pack_bytes(path, {"a": torch.ones(4)})
    at = places(data)
    front = data[:24] + graph_of_many_ids(data[24 : at.index], count)
    index = -(-len(front) // 64) * 64
    index_nbytes = at.index_end - at.index
    region = -(-(index + index_nbytes + LOCATOR.size) // PAGE) * PAGE
    changed = bytearray(region) + data[at.region :]
    changed[: len(front)] = front
    struct.pack_into("<Q", changed, 8, region)
    changed[index : index + index_nbytes] = data[at.index : at.index_end]
    changed[region - LOCATOR.size : region] = data[at.locator : at.region]
    struct.pack_into("<QQQ", changed, region - LOCATOR.size, index, index_nbytes, len(changed))
    path.write_bytes(reseal(changed))


def test_constants_beyond_the_tensors_of_a_pack_cost_little_more_than_their_bytes(path: Path) -> None:
    count = 200_000
    write_pack_of_many_ids(path, count)
    with stream_pack.open(path) as pack:
        report, peak = peak_of(lambda: pack.verify(jobs=1))
    assert report.ok  # section 4: one for each tensor at least
    # The graph is read, and has two 32-bit numbers of each.  That no node uses a value before it is there takes 32 bits
    # of each value, and 64 of each to find it by; a byte more for each is more than is needed.
    assert peak < (8 + 4 + 8) * count + count


def test_a_payload_that_names_one_constant_many_times_is_refused_before_all_are_decoded(path: Path) -> None:
    count = 200_000
    data = pack_bytes(path, {"a": torch.ones(4)})
    at = places(data)
    head = data[:24] + graph_of_many_ids(data[24 : at.index], count)
    region = -(-len(head) // PAGE) * PAGE
    payload = bytearray(head + bytes(region - len(head)) + data[at.region : at.region_end])
    struct.pack_into("<Q", payload, 8, region)
    path.write_bytes(payload)

    def refuse() -> None:
        with pytest.raises(FormatError, match="names a constant twice"):
            stream_pack.open(path, kind="mps")

    _, peak = peak_of(refuse)
    assert peak < 32 * count  # decoding takes more than 100 bytes for each


@pytest.mark.parametrize("nbytes", [4096 + 8, 1 << 20])
def test_a_place_for_a_footer_longer_than_the_limit_is_refused(path: Path, tmp_path: Path, nbytes: int) -> None:
    data = bytearray(pack_bytes(path, {"a": torch.ones(4)}))
    at = places(data)
    data[at.footer : at.footer] = bytes(nbytes - 24)
    struct.pack_into("<Q", data, at.locator + 16, len(data))
    struct.pack_into("<I", data, len(data) - 16, nbytes)
    path.write_bytes(reseal(data, at))
    with pytest.raises(FormatError, match=f"leave {nbytes} for a footer of 24 to 4096"):
        stream_pack.open(path)
    with pytest.raises(FormatError, match=f"leave {nbytes} for a footer of 24 to 4096"):
        stream_pack.convert(path, tmp_path / "target")


def test_a_footer_as_long_as_the_limit_is_read(path: Path, tmp_path: Path) -> None:
    data = bytearray(pack_bytes(path, {"a": torch.ones(4)}))
    at = places(data)
    data[at.footer : at.footer] = bytes(4096 - 24)  # fields that this version does not know
    struct.pack_into("<Q", data, at.locator + 16, len(data))
    struct.pack_into("<I", data, len(data) - 16, 4096)
    path.write_bytes(reseal(data, at))
    with stream_pack.open(path, verify="full") as pack:
        assert pack["a"].torch().tolist() == [1.0] * 4
    stream_pack.convert(path, tmp_path / "target")
