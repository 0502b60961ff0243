"""Casting gives torch's bits, however the bytes are cut into chunks."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.format.dtypes import BITS, BY_NAME
from stream_pack.pipeline.adapt.cast import CastStream, cast_bytes
from stream_pack.pipeline.chunks import Chunk, Zeros

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT8 = tuple(name for name in BY_NAME if name.startswith("float8"))
PAIRS = list(itertools.permutations(FLOATS, 2))


def every_pattern() -> bytes:
    return np.arange(65536, dtype="<u2").tobytes()


def random_patterns(dtype: str) -> bytes:
    return np.random.default_rng(1).bytes(200_000 * BITS[BY_NAME[dtype]] // 8)


def edges(target: str) -> bytes:
    """float64: every finite value of ``target`` (of 16 bits), the middles between neighbours, and their neighbours."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(getattr(torch, target))
    exact = values[values.isfinite()].double().sort().values.numpy()
    middles = (exact[1:] + exact[:-1]) / 2
    middles = np.append(middles, [2 * exact[-1] - middles[-1], middles[-1] - 2 * exact[-1]])
    around = [np.nextafter(middles, -np.inf), middles, np.nextafter(middles, np.inf)]
    return np.concatenate([exact, *around]).astype("<f8").tobytes()


def by_torch(data: bytes, source: str, target: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, source)).to(getattr(torch, target))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.itemsize])


def ours(data: bytes, source: str, target: str) -> torch.Tensor:
    result = cast_bytes(memoryview(data), BY_NAME[source], BY_NAME[target])
    return torch.frombuffer(bytearray(result), dtype=getattr(torch, target))


def assert_as_torch(data: bytes, source: str, target: str, *, nans: bool = True) -> None:
    expected, actual = by_torch(data, source, target), ours(data, source, target)
    numbers = ~expected.isnan()
    assert torch.equal(bits(actual)[numbers], bits(expected)[numbers])
    assert actual[~numbers].isnan().all()
    # torch's NaNs are those of its vector code only where it has any.
    if nans and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_16_bit_value_and_many_others_are_cast_as_torch_does(source: str, target: str) -> None:
    wide = source in ("float32", "float64")
    assert_as_torch(random_patterns(source) if wide else every_pattern(), source, target)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOAT8)
@pytest.mark.parametrize("times", [1, 5, 300])  # torch's code for one value, for a few, and for many
def test_every_float8_is_cast_as_torch_does(source: str, target: str, times: int) -> None:
    assert_as_torch(bytes(range(256)) * times, source, target)
    for pattern in range(256):
        assert_as_torch(bytes([pattern]), source, target, nans=False)


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        # By hand, from the definitions: exponent bias 7 and 15; for the fnuz types one more; for e8m0 127.
        ("float8_e4m3fn", 0x7E, 448.0),
        ("float8_e4m3fn", 0x81, -(2.0**-9)),
        ("float8_e5m2", 0xFB, -57344.0),
        ("float8_e5m2", 0x01, 2.0**-16),
        ("float8_e5m2", 0x7C, math.inf),
        ("float8_e4m3fnuz", 0x7F, 240.0),
        ("float8_e5m2fnuz", 0x7F, 57344.0),
        ("float8_e8m0fnu", 0x00, 2.0**-127),
        ("float8_e8m0fnu", 0xFE, 2.0**127),
    ],
)
def test_float8_values_known_from_their_definitions(source: str, before: int, after: float) -> None:
    for target, code in (("float32", "<f"), ("float64", "<d")):
        result = cast_bytes(memoryview(bytes([before])), BY_NAME[source], BY_NAME[target])
        assert struct.unpack(code, result) == (after,)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_values_halfway_between_two_are_cast_as_torch_does(source: str, target: str) -> None:
    data = edges(target)
    if source == "float32":
        with np.errstate(over="ignore"):
            data = np.frombuffer(data, "<f8").astype("<f4").tobytes()
    assert_as_torch(data, source, target)


@given(values=st.lists(st.floats(allow_nan=False), min_size=1), target=st.sampled_from(FLOATS[:3]))
def test_any_float64_is_cast_as_torch_does(values: list[float], target: str) -> None:
    assert_as_torch(np.array(values, "<f8").tobytes(), "float64", target)


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        # Source: torch 2.13 on x86-64 with AVX2, tensors of 64 elements.
        ("float32", "float16", 0x7F800001, 0x7E00),
        ("float32", "float16", 0x7FA00000, 0x7F00),
        ("float32", "float16", 0xFFC12345, 0xFE09),
        ("float64", "float16", 0xFFF8123456789ABC, 0xFE04),
        ("bfloat16", "float16", 0x7F81, 0x7E08),
        ("float32", "bfloat16", 0xFF800001, 0xFFFF),
        ("float64", "bfloat16", 0x7FF8000000000000, 0xFFFF),
        ("float16", "bfloat16", 0xFC01, 0x7FC0),
        ("float16", "float32", 0xFC01, 0xFFC02000),
        ("bfloat16", "float32", 0x7F81, 0x7F810000),
        ("float64", "float32", 0x7FF0000000000001, 0x7FC00000),
        ("float16", "float64", 0x7C40, 0x7FF9000000000000),
        ("bfloat16", "float64", 0xFF81, 0xFFF8200000000000),
        ("float32", "float64", 0x7F800001, 0x7FF8000020000000),
        # By hand: to nearest, ties to even; twice where a float64 becomes a float16.
        ("float32", "float16", 0x477FEFFF, 0x7BFF),  # just below 65520: 65504
        ("float32", "float16", 0x477FF000, 0x7C00),  # 65520: infinity
        ("float32", "bfloat16", 0x3F808000, 0x3F80),
        ("float32", "bfloat16", 0x3F818000, 0x3F82),
        ("float64", "float16", 0x3FF0020000000001, 0x3C00),  # 1 + 2**-11 + 2**-52 is 1 + 2**-11 first
        ("float16", "bfloat16", 0x0001, 0x3380),  # the smallest denormal, 2**-24
        ("float64", "float32", 0x8000000000000001, 0x80000000),
    ],
)
def test_bits_known_from_elsewhere(source: str, target: str, before: int, after: int) -> None:
    data = before.to_bytes(BITS[BY_NAME[source]] // 8, "little")
    result = cast_bytes(memoryview(data), BY_NAME[source], BY_NAME[target])
    assert hex(int.from_bytes(result, "little")) == hex(after)


def test_overflow_and_signalling_nans_print_no_warning() -> None:
    # Warnings are errors in these tests.
    data = np.array([1e300, -1e300, np.inf], "<f8").tobytes() + bytes.fromhex("010000000000f07f")
    for target in (torch.float16, torch.bfloat16, torch.float32):
        name = str(target).removeprefix("torch.")
        result = cast_bytes(memoryview(data), BY_NAME["float64"], BY_NAME[name])
        found = torch.frombuffer(bytearray(result), dtype=target).tolist()
        assert found[:3] == [np.inf, -np.inf, np.inf]
        assert np.isnan(found[3])


def cut(data: bytes, step: int) -> Iterator[bytes]:
    for begin in range(0, len(data), step):
        yield data[begin : begin + step]


def stream(source: str, target: str, *, nbytes: int, skip: int = 0, chunk_nbytes: int = 1 << 20) -> CastStream:
    return CastStream(BY_NAME[source], BY_NAME[target], skip=skip, nbytes=nbytes, chunk_nbytes=chunk_nbytes)


def joined(chunks: Iterator[Chunk]) -> bytes:
    return b"".join(bytes(len(c)) if isinstance(c, Zeros) else bytes(c) for c in chunks)


@pytest.mark.parametrize("chunk_nbytes", [1, 3, 7, 64])
@pytest.mark.parametrize("step", [1, 3, 7, 8, 4096])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_elements_may_be_cut_anywhere(source: str, target: str, step: int, chunk_nbytes: int) -> None:
    data = np.random.default_rng(2).standard_normal(25).astype("<f8").tobytes()
    expected = bytes(cast_bytes(memoryview(data), BY_NAME[source], BY_NAME[target]))
    casting = stream(source, target, nbytes=len(expected), chunk_nbytes=chunk_nbytes)
    parts = [part for chunk in cut(data, step) for part in casting.feed(chunk)]
    assert max(map(len, parts)) <= chunk_nbytes
    assert joined(iter(parts)) == expected


def test_only_the_bytes_that_are_wanted_come_out() -> None:
    data = np.arange(10, dtype="<f4").tobytes()
    whole = np.arange(10, dtype="<f8").tobytes()
    casting = stream("float32", "float64", skip=3, nbytes=60)
    assert joined(part for chunk in cut(data, 7) for part in casting.feed(chunk)) == whole[3:63]


@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_zeros_stay_zeros_that_take_no_memory(before: int) -> None:
    ones = np.ones(2, "<f4").tobytes()
    data = ones[:before]
    casting = stream("float32", "float16", nbytes=1 << 50)
    parts = list(casting.feed(data)) + list(casting.feed(Zeros((1 << 41) - before)))
    assert sum(map(len, parts)) == 1 << 40
    assert sum(len(part) for part in parts if not isinstance(part, Zeros)) <= 4
    rest = list(casting.feed(Zeros(3))) + list(casting.feed(ones[3:4]))
    assert joined(iter(rest)) == np.frombuffer(bytes(3) + ones[3:4], "<f4").astype("<f2").tobytes()


def test_zero_bits_of_e8m0_are_no_zeros() -> None:
    data = bytes([127]) + bytes(9) + bytes([128])
    expected = torch.frombuffer(bytearray(data), dtype=torch.float8_e8m0fnu).float()
    casting = stream("float8_e8m0fnu", "float32", nbytes=44, chunk_nbytes=8)
    parts = [*casting.feed(data[:1]), *casting.feed(Zeros(9)), *casting.feed(data[10:])]
    assert max(map(len, parts)) <= 8
    assert joined(iter(parts)) == expected.numpy().tobytes()
