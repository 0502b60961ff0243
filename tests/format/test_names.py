"""Names as one column behave as the texts that they are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.format.names import Names

texts = st.lists(st.text(st.characters(), max_size=6), max_size=12)


@given(texts)
def test_they_are_a_sequence_of_the_same_texts(given_texts: list[str]) -> None:
    names = Names.of(given_texts)
    assert list(names) == given_texts
    assert names == given_texts and names == tuple(given_texts)
    assert [names[row] for row in range(-len(names), len(names))] == given_texts * 2
    assert names[1:-1] == given_texts[1:-1]
    assert names != [*given_texts, "w"]
    assert Names.of(names) is names


@given(texts)
def test_their_order_is_that_of_their_bytes(given_texts: list[str]) -> None:
    expected = sorted(range(len(given_texts)), key=lambda row: given_texts[row].encode("utf-8", "surrogatepass"))
    assert Names.of(given_texts).order().tolist() == expected


@pytest.mark.parametrize("row", [2, -3])
def test_a_row_that_is_not_there_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError):
        Names.of(["a", "b"])[row]
