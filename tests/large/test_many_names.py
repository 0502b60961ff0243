"""A million tensors: the head is made whole, and read back."""

from __future__ import annotations

import numpy as np

from stream_pack.format import graph_mps
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import decode_head, encode_head
from stream_pack.format.header_kinds import MPS
from stream_pack.format.layout import Policy, plan

COUNT = 1_000_000
U8 = BY_NAME["uint8"]


def name(number: int) -> str:
    # In file order when sorted by number, in another when sorted by name.
    return f"model.layers.{number}.experts.{number % 7}.weight"


def test_a_million_names_are_planned_written_and_found_again() -> None:
    # FB#234: above 100 MB, where builders of flatbuffers give up in the middle.
    builder = CatalogBuilder()
    for number in range(COUNT):
        builder.add(name(number), U8, (number % 5 + 1,), storage=number, start=0)
    encoded = encode_head(plan(builder.build(storages_nbytes=0), Policy()), MPS)
    assert len(encoded.front) > 100 << 20
    assert encoded.head.region_nbytes == (COUNT * 256 + 16383) // 16384 * 16384
    data = memoryview(encoded.front + bytes(encoded.padding_nbytes) + encoded.locator)
    index = decode_head(data).index
    del encoded
    assert len(index) == COUNT
    for number in (0, 1, 499_999, COUNT - 1):
        assert index.name(number) == name(number)
        assert index.shape(number) == (number % 5 + 1,)
        assert index.offsets[number] == 256 * number
    order = index.name_order[[0, COUNT // 2, COUNT - 1]].tolist()
    by_name = sorted(range(COUNT), key=name)
    assert order == [by_name[0], by_name[COUNT // 2], by_name[-1]]
    values = graph_mps.decode(data[24:])
    assert len(values.ids) == COUNT
    assert np.array_equal(values.offsets[:COUNT], np.arange(COUNT) * 256)
