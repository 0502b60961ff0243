"""Damaged copies of bytes, the share of them that a quick run tries, and what a refusal has to be like.

Where every byte of a file is changed, one test tries them all and reports all that failed, instead of being a test for
each; :func:`some_or_all` makes it two tests, a quick one that tries some and a slow one that tries all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import TypeVar
from zlib import crc32

import pytest

from stream_pack import StreamPackError
from stream_pack.errors import (
    LimitError,
    SourceChecksumError,
    SourceError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)

__all__ = [
    "UNREADABLE",
    "Share",
    "assert_refusal",
    "check_each",
    "cut",
    "flipped",
    "may_refuse",
    "some_or_all",
    "two_bits_of_each_byte",
]

_T = TypeVar("_T")

LONGEST = 2400
"""Characters of a message: five names of up to 400, and what is said about them."""

_SHOWN = 20

UNREADABLE = (
    LimitError,
    SourceChecksumError,
    SourceError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
"""What a damaged checkpoint of torch.save may be refused with, wherever the damage is."""


@dataclass(frozen=True, slots=True)
class Share:
    """One case of every ``one_of``."""

    one_of: int

    def of(self, cases: Iterable[_T], seed: str = "") -> Iterator[_T]:
        """The cases to try.  They begin at another one for each ``seed``, the same on every machine."""
        return islice(cases, crc32(seed.encode()) % self.one_of, None, self.one_of)


def some_or_all(one_of: int) -> pytest.MarkDecorator:
    """Two tests of one: ``share`` is one case of every ``one_of`` (best a prime), and, in the slow one, all."""
    return pytest.mark.parametrize(
        "share", [pytest.param(Share(one_of), id="some"), pytest.param(Share(1), id="all", marks=pytest.mark.slow)]
    )


def flipped(
    data: bytes,
    places: Iterable[int] | None = None,
    *,
    masks: Iterable[int] = (0xFF,),
    share: Share = Share(1),
    seed: str = "",
) -> Iterator[tuple[str, bytes]]:
    """Copies of ``data`` with the bits of one mask flipped in one byte (None: in every byte), and where."""
    tried = product(range(len(data)) if places is None else places, masks)
    for place, mask in share.of(tried, seed):
        changed = bytearray(data)
        changed[place] ^= mask
        yield f"byte {place} ^ {mask:#04x}", bytes(changed)


def two_bits_of_each_byte(data: bytes, apart: int, share: Share = Share(1)) -> Iterator[tuple[str, bytes]]:
    """Copies of ``data`` with one bit flipped: in each byte another one than in the last, and one ``apart``."""
    tried = ((at, bit % 8) for at in range(len(data)) for bit in (at, at + apart))
    for at, bit in share.of(tried):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        yield f"bit {bit} of byte {at}", bytes(changed)


def cut(data: bytes, lengths: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """The beginnings of ``data`` that have these lengths."""
    for nbytes in lengths:
        yield f"{nbytes} of {len(data)} bytes", data[:nbytes]


def check_each(cases: Iterable[tuple[str, _T]], check: Callable[[_T], object]) -> None:
    """Check every case, named by its text, and fail at the end with all that failed."""
    failed, count = [], 0
    for name, case in cases:
        count += 1
        try:
            check(case)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert count, "there was nothing to try"
    shown = "\n".join(failed[:_SHOWN])
    assert not failed, f"{len(failed)} of {count} failed, the first of them:\n{shown}"


def assert_refusal(error: BaseException, *expected: type[StreamPackError]) -> None:
    """The error is of one of these very classes, and its message is one printable line that is not too long."""
    assert type(error) in expected, f"{type(error).__name__}: {error}"
    message = str(error)
    assert message.isprintable(), repr(message)
    assert len(message) <= LONGEST, f"{len(message)} characters: {message[:200]!r}"


@contextmanager
def may_refuse(*expected: type[StreamPackError], begins: str = "") -> Iterator[None]:
    """What is done inside ends well or in a refusal as :func:`assert_refusal` wants it, and not in another error.

    ``begins``: the first words of its message.
    """
    try:
        yield
    except StreamPackError as error:
        assert_refusal(error, *expected)
        assert str(error).startswith(begins)  # noqa: PT017 - it need not be refused
