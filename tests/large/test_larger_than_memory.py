"""A pack of four times the machine's memory, with holes for weights: mapped, not loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import stream_pack
from stream_pack import ChecksumError
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.checksum import xxh3_of_zeros
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import encode_footer, encode_head
from stream_pack.format.header_kinds import MPS
from stream_pack.format.layout import Policy, plan
from stream_pack.inspection.inspect import inspect_pack
from tests.support.memory import anonymous_nbytes
from tests.support.smaps import mapped_file

MEMORY_NBYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
BLOCK_NBYTES = 1 << 30
# On a file system that takes no file so large, as large as it takes.
HUGE_NBYTES = min(4 * MEMORY_NBYTES, 15 << 40) // BLOCK_NBYTES * BLOCK_NBYTES
MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """first: f32 [0 1 2], huge: zeros that are holes, last: f32 [7 8 9], and one row of huge is not zero."""
    path = tmp_path_factory.mktemp("larger") / "pack"
    builder = CatalogBuilder()
    builder.add("first", BY_NAME["float32"], (3,), storage=0, start=0)
    builder.add("huge", BY_NAME["uint8"], (HUGE_NBYTES // MIB, MIB), storage=1, start=0)
    builder.add("last", BY_NAME["float32"], (3,), storage=2, start=0)
    layout = plan(builder.build(storages_nbytes=0), Policy(block_nbytes=BLOCK_NBYTES))
    encoded = encode_head(layout, MPS)
    first, last = np.arange(3, dtype="<f4").tobytes(), np.arange(7, 10, dtype="<f4").tobytes()
    blocks = [xxh3_of_zeros(BLOCK_NBYTES)] * (HUGE_NBYTES // BLOCK_NBYTES)
    sums = [xxhash.xxh3_64_intdigest(first), *blocks, xxhash.xxh3_64_intdigest(last)]
    checksums = np.array(sums, "<u8").tobytes()
    offsets = layout.index.buffer_offsets.tolist()
    with path.open("wb") as file:
        file.truncate(encoded.head.pack_nbytes)
        for place, data in [
            (0, encoded.front),
            (encoded.head.region_file_offset - len(encoded.locator), encoded.locator),
            (encoded.head.region_file_offset + offsets[0], first),
            (encoded.head.region_file_offset + offsets[2], last),
            (encoded.head.checksums_file_offset, checksums + encode_footer(encoded.head, checksums)),
        ]:
            os.pwrite(file.fileno(), data, place)
    yield path
    path.unlink()


def test_first_and_last_tensor_are_read_through_numpy_and_torch(path: Path) -> None:
    assert path.stat().st_size > HUGE_NBYTES
    before = anonymous_nbytes()
    with stream_pack.open(path) as pack:
        assert pack["first"].numpy().tolist() == pack["first"].torch().tolist() == [0, 1, 2]
        assert pack["last"].numpy().tolist() == pack["last"].torch().tolist() == [7, 8, 9]
        assert pack["last"].file_offset > HUGE_NBYTES
        huge = pack["huge"]
        assert huge.torch().numel() == huge.nbytes == HUGE_NBYTES
        assert huge.torch().data_ptr() + huge.nbytes <= pack["last"].torch().data_ptr()
    assert anonymous_nbytes() - before < 64 * MIB


def test_a_private_mapping_of_all_of_it_costs_the_page_that_is_written(path: Path) -> None:
    # Without MAP_NORESERVE this is refused: the file is larger than memory and swap.
    with stream_pack.open(path) as pack:
        tensor = pack["huge"].torch()
        tensor[-1, -1] = 5
        tensor[0, 0] = 6
        assert mapped_file(path).anonymous == 2 * os.sysconf("SC_PAGE_SIZE")
        assert "rw-p" in mapped_file(path).permissions
        assert pack["huge"].numpy()[-1, -1] == 0
        assert pack["last"].torch().tolist() == [7, 8, 9]


def test_opening_listing_and_describing_touch_next_to_nothing(path: Path) -> None:
    # PT#23382
    with stream_pack.open(path) as pack:
        assert [(name, view.shape) for name, view in pack.items()][2] == ("last", (3,))
        description = inspect_pack(pack)
        assert pack["huge"].torch().is_pinned() is False
        assert mapped_file(path).resident < MIB
    assert sum(part.nbytes for part in description.parts) == path.stat().st_size


def test_a_slice_is_verified_without_the_rest(path: Path) -> None:
    with path.open("r+b") as file, stream_pack.open(path) as pack:
        row = pack.get_slice("huge")[BLOCK_NBYTES // MIB]
        os.pwrite(file.fileno(), b"\1", row.file_offset)
    try:
        with stream_pack.open(path, verify="lazy") as pack:
            assert not pack.get_slice("huge")[5].numpy().any()
            with pytest.raises(ChecksumError) as caught:
                pack.get_slice("huge")[BLOCK_NBYTES // MIB].numpy()
            assert (caught.value.block, caught.value.tensors) == (1, ("huge",))
    finally:
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"\0", row.file_offset)
    assert torch.equal(stream_pack.load_file(path, names=["first"])["first"], torch.arange(3.0))
