"""Strided views: against torch, which is what defines them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import UnsupportedTensorError
from stream_pack.format.dtypes import BY_NAME
from stream_pack.pipeline.gather import strided_chunks
from stream_pack.pipeline.geometry import Recipe, recipe

ELEMENTS = 500
TORCH = {
    name: getattr(torch, name)
    for name in ("uint8", "bfloat16", "float16", "int32", "float64", "complex64", "complex128")
}


def made(
    dtype: str,
    *,
    offset: int = 0,
    shape: tuple[int, ...] = (1,),
    strides: tuple[int, ...] = (1,),
    storage_nbytes: int = 4000,
    big_endian: bool = False,
    conj: bool = False,
    neg: bool = False,
) -> Recipe:
    return recipe(
        "w",
        dtype=BY_NAME[dtype],
        offset=offset,
        shape=shape,
        strides=strides,
        storage_nbytes=storage_nbytes,
        big_endian=big_endian,
        conj=conj,
        neg=neg,
    )


def gathered(how: Recipe, storage: bytes, chunk_nbytes: int = 64) -> bytes:
    view = how.view(memoryview(storage))
    windows = strided_chunks(view, chunk_nbytes=chunk_nbytes)
    return b"".join(how.resolve(window) for window in windows)


def storage_of(dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    nbytes = ELEMENTS * TORCH[dtype].itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@st.composite
def views(draw: st.DrawFn) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    rank = draw(st.integers(0, 5))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    strides = tuple(draw(st.integers(0, 30)) for _ in range(rank))
    return draw(st.sampled_from(sorted(TORCH))), draw(st.integers(0, 30)), shape, strides


@given(views(), st.sampled_from([1, 7, 4096]))
def test_any_strided_view_has_the_bytes_that_torch_gives_it(
    view: tuple[str, int, tuple[int, ...], tuple[int, ...]], chunk_nbytes: int
) -> None:
    dtype, offset, shape, strides = view
    storage = storage_of(dtype)
    tensor = torch.as_strided(storage.view(TORCH[dtype]), shape, strides, offset)
    expected = bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy())
    how = made(dtype, offset=offset, shape=shape, strides=strides, storage_nbytes=len(storage))
    data = bytes(storage.numpy())
    assert gathered(how, data, chunk_nbytes) == expected
    assert how.contiguous == tensor.is_contiguous() or data[how.start : how.end] == expected
    if how.contiguous:
        assert data[how.start : how.start + len(expected)] == expected


@pytest.mark.parametrize(("conj", "neg"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_conj_and_neg_bits_of_complex_numbers_are_resolved(dtype: str, conj: bool, neg: bool) -> None:
    plain = storage_of("uint8").to(torch.float64)[:16].view(torch.complex128).to(TORCH[dtype])
    plain = plain.clone()
    tensor = plain.conj() if conj else plain
    tensor = tensor.resolve_conj().neg() if neg else tensor.resolve_conj()
    expected = bytes(torch.view_as_real(tensor).contiguous().view(torch.uint8).reshape(-1).numpy())
    how = made(dtype, shape=(8,), conj=conj, neg=neg)
    stored = bytes(torch.view_as_real(plain).contiguous().view(torch.uint8).reshape(-1).numpy())
    assert not how.contiguous
    assert gathered(how, stored) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_neg_bit_of_floats_flips_every_sign_even_of_zero(dtype: str) -> None:
    plain = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf")], dtype=TORCH[dtype])
    expected = bytes(plain.neg().view(torch.uint8).numpy())
    how = made(dtype, shape=(5,), neg=True)
    assert gathered(how, bytes(plain.view(torch.uint8).numpy())) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", "0001020304050607"), ("bfloat16", "0100030205040706"), ("int32", "0302010007060504"),
     ("float64", "0706050403020100"), ("complex64", "0302010007060504")],
)  # fmt: skip
def test_big_endian_elements_are_reversed_and_complex_ones_by_halves(dtype: str, expected: str) -> None:
    how = made(dtype, shape=(8 // TORCH[dtype].itemsize,), big_endian=True)
    assert gathered(how, bytes(range(8))).hex() == expected


def test_a_big_endian_conjugate_flips_the_sign_after_the_swap() -> None:
    how = made("complex64", big_endian=True, conj=True)
    assert gathered(how, bytes.fromhex("3f80000040000000")).hex() == "0000803f000000c0"  # 1-2j


def test_equal_views_written_differently_have_equal_recipes() -> None:
    assert made("int32", shape=(2, 3), strides=(3, 1)) == made("int32", shape=(6,))
    assert made("int32", shape=(1, 6, 1), strides=(99, 1, 77)) == made("int32", shape=(6,))
    assert made("int32", shape=(2, 3), strides=(3, 1)).contiguous
    assert not made("int32", shape=(3, 2), strides=(1, 3)).contiguous


def test_one_element_expanded_to_a_tebibyte_is_only_planned() -> None:
    how = made("float64", shape=(2**40,), strides=(0,), storage_nbytes=8)
    assert (how.start, how.end) == (0, 8)
    windows = strided_chunks(how.view(memoryview(b"12345678")), chunk_nbytes=16)
    assert bytes(next(windows)) == b"1234567812345678"


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (11,), (1,)),
        (1, (10,), (1,)),
        (10, (1,), (1,)),
        (10, (), ()),
        (0, (2, 2), (9, 1)),
        (0, (2,), (2**62,)),
        (0, (2**62,), (1,)),
        (2**62, (1,), (1,)),
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (9, (2,), (-1,)),
    ],
)
def test_elements_outside_the_storage_are_refused_by_name(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedTensorError, match="'w'") as caught:
        made("int32", offset=offset, shape=shape, strides=strides, storage_nbytes=40)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    ("dtype", "conj", "neg"), [("float64", True, False), ("int32", False, True), ("uint8", True, True)]
)
def test_a_bit_that_means_nothing_for_the_dtype_is_refused(dtype: str, conj: bool, neg: bool) -> None:
    with pytest.raises(UnsupportedTensorError, match="bit set"):
        made(dtype, conj=conj, neg=neg)


def test_more_dims_than_numpy_can_view_are_refused_unless_they_merge() -> None:
    assert made("uint8", shape=(1,) * 200, strides=(5,) * 200).contiguous
    with pytest.raises(UnsupportedTensorError, match="33 dims"):
        made("uint8", shape=(2,) * 33, strides=(0, 1) * 16 + (0,), storage_nbytes=10**6)
