"""How names, lists, counts and sizes are written in messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.text import counted, human_nbytes, listed, printable, quoted


def test_a_name_is_quoted_and_escaped() -> None:
    assert quoted("model.wq") == "'model.wq'"
    assert quoted("it's") == '"it\'s"'
    assert quoted("a\nb\x1b[31m\ud800") == r"'a\nb\x1b[31m\ud800'"
    assert quoted(b"caf\xe9") == r"b'caf\xe9'"


def test_what_is_no_name_is_shown_as_it_is() -> None:
    assert quoted(3) == "3"
    assert quoted(["a", 0]) == "['a', 0]"
    assert len(quoted(tuple(range(10_000)))) == 403


def test_a_long_name_is_cut_and_says_so() -> None:
    assert quoted("x" * 200) == "'" + "x" * 200 + "'"
    assert quoted("x" * 201) == "'" + "x" * 200 + "'..."
    assert quoted("abcdef", most=3) == "'abc'..."


@given(st.text(st.characters(codec=None)) | st.binary(), st.integers(1, 64))
def test_no_name_makes_a_message_long_or_breaks_its_line(name: str | bytes, times: int) -> None:
    text = quoted(name * times)
    assert len(text) <= 403
    assert text.isprintable()


def test_a_million_characters_that_need_escapes_stay_short() -> None:
    assert len(quoted("\U000e0001" * 1_000_000)) == 403


def test_a_list_shows_the_first_names_and_counts_the_others() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "'a'"
    assert listed(iter("abcde")) == "'a', 'b', 'c', 'd', 'e'"
    assert listed(iter("abcdef")) == "'a', 'b', 'c', 'd', 'e' and 1 more"
    assert listed({"a": 0, "b": 0, "c": 0}, most=1) == "'a' and 2 more"
    assert listed(["a", "b"], most=2, total=7) == "'a', 'b' and 5 more"


def test_what_would_drive_a_terminal_is_escaped() -> None:
    assert printable("naïve \x1b[2J\n\u202e") == r"naïve \x1b[2J\n\u202e"


def test_one_is_not_plural() -> None:
    assert [counted(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (1 << 20, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (5 << 40, "5.00 TiB"),
        (1 << 62, "4.00 EiB"),
    ],
)
def test_bytes_are_shown_in_iec_units(nbytes: int, text: str) -> None:
    assert human_nbytes(nbytes) == text
