"""Block checksums, against xxhash over the bytes themselves."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import LimitError
from stream_pack.format.checksum import BlockHasher, block_counts, check_block_nbytes, xxh3, xxh3_of_zeros, zeros

BLOCK = 4096


def expected(data: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def test_the_function_is_xxh3_64_with_seed_0() -> None:
    # The empty input's and "abc"'s values, as xxhsum -H3 prints them.
    assert xxh3([]) == 0x2D06800538D394C2
    assert xxh3([b"a", memoryview(b"bc")]) == 0x78AF5F94892F3950 == xxhash.xxh3_64_intdigest(b"abc", seed=0)


@pytest.mark.parametrize("chunk", [1, 7, 4093, 4096, 10_000, 1 << 20])
def test_chunks_of_any_length_give_the_same_checksums(chunk: int) -> None:
    data = np.random.default_rng(0).bytes(3 * BLOCK + 5)
    for nbytes in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, len(data)):
        hasher = BlockHasher(BLOCK)
        found = []
        for at in range(0, nbytes, chunk):
            found += hasher.update(data[at : min(at + chunk, nbytes)])
        assert found + hasher.finish() == expected(data[:nbytes])


@given(st.lists(st.one_of(st.binary(max_size=6000), st.integers(0, 3 * BLOCK)), max_size=8))
def test_zeros_that_are_only_counted_hash_like_zeros(pieces: list[bytes | int]) -> None:
    hasher = BlockHasher(BLOCK)
    found, data = [], b""
    for piece in pieces:
        if isinstance(piece, int):
            found += hasher.update_zeros(piece)
            data += bytes(piece)
        else:
            found += hasher.update(piece)
            data += piece
    assert found + hasher.finish() == expected(data)
    assert hasher.finish() == []


def test_a_hasher_serves_buffer_after_buffer() -> None:
    hasher = BlockHasher(BLOCK)
    for data in (b"first", b"second" * 1000, b""):
        assert hasher.update(data) + hasher.finish() == expected(data)


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17])
def test_zeros_come_in_parts_that_add_up(nbytes: int) -> None:
    parts = list(zeros(nbytes))
    assert sum(map(len, parts)) == nbytes
    assert not any(bytes(part).strip(b"\0") for part in parts)
    assert max(map(len, parts)) <= 1 << 20
    assert xxh3_of_zeros(nbytes) == xxhash.xxh3_64_intdigest(bytes(nbytes))


def test_block_counts_do_not_wrap_near_the_limit() -> None:
    nbytes = np.array([1, BLOCK - 1, BLOCK, BLOCK + 1, 2**62, 2**63 - 1])
    assert block_counts(nbytes, BLOCK).tolist() == [1, 1, 1, 2, 2**50, 2**51]


def test_block_lengths_are_powers_of_two_within_the_limits() -> None:
    for good in (2**12, 2**22, 2**30):
        assert check_block_nbytes(good) == good
    for bad in (0, -4096, 2048, 4095, 4097, 3 * 2**20, 2**31):
        with pytest.raises(LimitError, match="power of two from 4096 to 1073741824"):
            check_block_nbytes(bad)
