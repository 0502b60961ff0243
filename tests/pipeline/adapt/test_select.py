"""Which tensors are taken, what they are called then, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stream_pack.errors import OptionError, SourceError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.pipeline.adapt.select import Rename, Selection, select

INT16 = BY_NAME["int16"]


def catalog(*names: str, shapes: Sequence[tuple[int, ...]] = ()) -> Catalog:
    """Tensor ``k`` is storage ``k``, and has the note "place" = its name."""
    builder = CatalogBuilder()
    for k, name in enumerate(names):
        shape = shapes[k] if shapes else (k + 1,)
        builder.add(name, INT16, shape, storage=k, start=2 * k, notes={"place": name})
    return builder.build(storages_nbytes=1000, metadata={"format": "pt"})


def chosen(names: Sequence[str], **selection: tuple[str, ...]) -> list[str]:
    return list(select(catalog(*names), Selection(**selection)).catalog.names)  # type: ignore[arg-type]


NAMES = ["model.norm", "model.w", "model.W", "head.w", "norm"]


def test_without_patterns_every_tensor_is_taken() -> None:
    assert chosen(NAMES) == NAMES


def test_a_glob_matches_the_whole_name_and_its_case() -> None:
    assert chosen(NAMES, include=("norm",)) == ["norm"]
    assert chosen(NAMES, include=("*.w",)) == ["model.w", "head.w"]
    assert chosen(NAMES, include=("model.[!n]",)) == ["model.w", "model.W"]
    assert chosen(NAMES, include=("?orm",)) == ["norm"]


def test_a_tensor_is_taken_if_any_pattern_matches_unless_one_excludes_it() -> None:
    assert chosen(NAMES, include=("head.*", "norm")) == ["head.w", "norm"]
    assert chosen(NAMES, exclude=("*norm", "head.*")) == ["model.w", "model.W"]
    assert chosen(NAMES, include=("model.*",), exclude=("*.W",)) == ["model.norm", "model.w"]


def test_a_glob_crosses_newlines_and_dots() -> None:
    assert chosen(["a.b\nc", "b"], include=("a*c",)) == ["a.b\nc"]


def test_when_nothing_is_left_the_error_shows_some_names() -> None:
    with pytest.raises(SourceError) as caught:
        chosen([f"layer.{k}" for k in range(7)], include=("layers.*",), exclude=("x",))
    assert "include 'layers.*', exclude 'x'" in str(caught.value)
    assert "'layer.0'" in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_a_source_without_tensors_stays_one() -> None:
    assert chosen([], include=("*",)) == []


def test_every_column_follows_its_tensor() -> None:
    before = catalog("c", "a", "b", "d", shapes=[(2, 3), (), (5,), (0, 7, 1)])
    taken = select(before, Selection(exclude=("b",), order="name"))
    after, rows = taken.catalog, taken.rows
    assert rows.tolist() == [1, 0, 3]
    assert after.names == ("a", "c", "d")
    assert [after.shape(k) for k in range(3)] == [(), (2, 3), (0, 7, 1)]
    assert after.nbytes.tolist() == [2, 12, 0]
    assert after.storages.tolist() == [1, 0, 3]
    assert after.starts.tolist() == [2, 0, 6]
    assert after.notes == ((0, "place", "a"), (1, "place", "c"), (2, "place", "d"))
    assert after.metadata == {"format": "pt"}
    assert after.storages_nbytes == 1000


def test_names_are_sorted_by_their_utf8_bytes_after_renaming() -> None:
    names = ["\U0001f600", "b", "\uffee", "B", "a"]  # UTF-16 would sort the first before the third
    after = select(catalog(*names), Selection(order="name", renames=(Rename.parse("s/^a$/c/"),))).catalog
    assert after.names == ("B", "b", "c", "\uffee", "\U0001f600")


@pytest.mark.parametrize(
    ("text", "name", "renamed"),
    [
        (r"s/^module\.//", "module.module.w", "module.w"),
        (r"s/module\.//g", "module.module.w", "w"),
        ("s/a/b/", "banana", "bbnana"),
        ("s/a/b/g", "banana", "bbnbnb"),
        (r"s/(\w+)\.(\w+)/\2.\1/", "x.y", "y.x"),
        (r"s/(?P<n>\d+)/<\g<n>>/", "h.12.w", "h.<12>.w"),
        (r"s/a\/b/c\/d/", "a/b", "c/d"),
        ("s|a/b|c/d|", "a/b", "c/d"),
        (r"s|a\|b|x|", "a|b", "x"),  # a delimiter behind a backslash means itself
        (r"s/\\/_/", "a\\b", "a_b"),
        ("s/x//", "abc", "abc"),
    ],
)
def test_names_are_rewritten_as_sed_would(text: str, name: str, renamed: str) -> None:
    assert Rename.parse(text)(name) == renamed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "s/",
        "s/a/",
        "s/a/b",
        "s/a/b/x",
        "s/a/b/gg",
        "y/a/b/",
        "saabba",
        "s\\a\\b\\",
        "s/(/b/",
        "s/a{2,1}/b/",
        "s a b ",
    ],
)
def test_a_renaming_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="invalid rename"):
        Rename.parse(text)


def test_a_replacement_that_names_no_group_is_refused() -> None:
    with pytest.raises(OptionError, match="'w'"):
        Rename.parse(r"s/w/\1/")("w")
    with pytest.raises(OptionError):
        Rename.parse(r"s/w/\g<none>/")("w")


def test_renamings_are_applied_one_after_the_other() -> None:
    renames = (Rename.parse("s/a/b/"), Rename.parse("s/b/c/"), str.upper)
    after = select(catalog("a", "x"), Selection(renames=renames)).catalog
    assert after.names == ("C", "X")


def test_two_tensors_that_would_get_one_name_are_refused_by_their_names() -> None:
    with pytest.raises(SourceError, match=r"'a\.w' and 'b\.w' would both be named 'w'"):
        select(catalog("a.w", "b.w"), Selection(renames=(Rename.parse(r"s/^.\.//"),)))


def test_a_collision_with_a_tensor_that_is_left_out_is_none() -> None:
    after = select(catalog("a.w", "b.w"), Selection(exclude=("a.*",), renames=(Rename.parse(r"s/^.\.//"),))).catalog
    assert after.names == ("w",)


def test_a_new_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(SourceError, match="UTF-8"):
        select(catalog("w"), Selection(renames=(lambda name: name + "\udc80",)))


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(OptionError, match="'size'"):
        Selection(order="size")  # type: ignore[arg-type]


def warnings(*names: str, **selection: object) -> list[str]:
    return list(select(catalog(*names), Selection(**selection)).warnings)  # type: ignore[arg-type]


def test_each_pattern_that_matches_no_name_is_named() -> None:
    such = "matches no tensor: it must match a whole name, such as 'a.w'"
    assert warnings("a.w", "b.w", include=("a.*", "w"), exclude=("optimizer.*", "b.w", "c")) == [
        f"--include 'w' (include=) {such}",
        f"--exclude 'optimizer.*' (exclude=) {such}",
        f"--exclude 'c' (exclude=) {such}",
    ]
    assert warnings("a.w", include=("*", "a.?"), exclude=("b",)) == [f"--exclude 'b' (exclude=) {such}"]
    assert warnings("a.w", "b.w", include=("a.*",), exclude=("b.*",)) == []


def test_each_rename_that_changes_no_name_is_named() -> None:
    idle, busy = Rename.parse(r"s/^module\.//"), Rename.parse("s/a/b/")
    assert warnings("a", "c", renames=(busy, idle)) == [
        r"--rename 's/^module\\.//' (rename=) changes no name",
    ]
    assert warnings("a", renames=(busy, Rename.parse("s/b/c/"))) == []  # the second sees what the first has made
    assert warnings("a", renames=(str.lower,)) == ["the function of rename= changes no name"]
    assert warnings("a", renames=(str.upper, str.upper)) == ["the function at 1 of rename= changes no name"]
    assert warnings("a", "x", exclude=("a",), renames=(busy,)) == ["--rename 's/a/b/' (rename=) changes no name"]
