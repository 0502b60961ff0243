"""Which tensors become which dtype, and what is said of rules that do nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stream_pack.errors import OptionError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.pipeline.adapt.cast_rules import CastRule, cast_rules, cast_targets

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def rule(pattern: str | None, dtype: str) -> CastRule:
    return CastRule("any", pattern, BY_NAME[dtype])


def catalog(**tensors: str) -> Catalog:
    """Tensors of these dtypes; ``Q8_0`` and the like are bytes whose note says so."""
    builder = CatalogBuilder()
    for storage, (name, dtype) in enumerate(tensors.items()):
        notes = None if dtype in BY_NAME else {"gguf.type": dtype}
        number = BY_NAME.get(dtype, BY_NAME["uint8"])
        builder.add(name.replace("__", "."), number, (4, 2), storage=storage, start=0, notes=notes)
    return builder.build(storages_nbytes=0)


def dtypes(before: Catalog, dtype: object) -> list[str]:
    targets, _ = cast_targets(before, cast_rules(dtype), before.names)
    return [DTYPES[number].name for number in targets.tolist()]


def warnings(before: Catalog, dtype: object) -> list[str]:
    _, found = cast_targets(before, cast_rules(dtype), before.names)
    return list(found)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("f16", "float16"),
        ("half", "float16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("double", "float64"),
        ("torch.float16", "float16"),
    ],
)
def test_a_dtype_has_the_names_that_people_use(dtype: str, name: str) -> None:
    assert cast_rules(dtype) == (rule(None, name),)


def test_a_dtype_may_be_one_of_torch_or_numpy() -> None:
    assert cast_rules(torch.bfloat16) == cast_rules("bf16")
    assert cast_rules(np.float16) == cast_rules(np.dtype("float16")) == cast_rules("f16")


def test_rules_come_as_text_as_a_sequence_or_as_a_mapping() -> None:
    norms = rule("norm=*", "float32")
    assert cast_rules(["norm=*=f32", "bf16"]) == (norms, rule(None, "bfloat16"))
    assert cast_rules(["norm=*=f32", torch.bfloat16]) == (norms, rule(None, "bfloat16"))
    assert cast_rules({"norm=*": torch.float32, "*": "bf16"}) == (norms, rule("*", "bfloat16"))
    assert cast_rules("norm=*=f32") == (norms,)
    assert cast_rules(None) == cast_rules(()) == ()


@pytest.mark.parametrize("dtype", ["", "int8", "f8", "F16", "norm=", "float8_e4m3fn", torch.int8, np.int16, 3])
def test_what_is_no_float_to_cast_to_is_refused(dtype: object) -> None:
    with pytest.raises(OptionError, match="cannot cast to"):
        cast_rules(dtype)


def test_a_mapping_has_globs_for_keys() -> None:
    with pytest.raises(OptionError, match=r"dtype=\{3: ...\}: expected globs"):
        cast_rules({3: "f16"})


def test_the_first_rule_that_matches_a_name_counts() -> None:
    before = catalog(norm__w="float32", w="float32", Norm="float32")
    assert dtypes(before, ["norm*=f64", "n*=f16", "w=f32", "bf16"]) == ["float64", "float32", "bfloat16"]


def test_a_rule_for_all_casts_only_floats_of_16_bits_and_more() -> None:
    others = [dtype.name for dtype in DTYPES if dtype.name not in FLOATS]
    assert dtypes(catalog(**{name: name for name in others}), "f64") == others


@pytest.mark.parametrize("pattern", ["*", "*float8*"])
def test_a_rule_with_a_glob_casts_float8_too(pattern: str) -> None:
    others = [dtype.name for dtype in DTYPES if dtype.name not in FLOATS]
    expected = ["bfloat16" if name in FLOAT8 else name for name in others]
    assert dtypes(catalog(**{name: name for name in others}), f"{pattern}=bf16") == expected


def test_a_rule_may_keep_what_later_rules_would_cast() -> None:
    before = catalog(a__scale="float32", a__w="float8_e4m3fn", b="float32", b8="float8_e5m2")
    expected = ["float32", "float8_e4m3fn", "bfloat16", "bfloat16"]
    assert dtypes(before, ["a.*=keep", "*=bf16"]) == expected
    assert dtypes(before, {"a.*": "keep", "*": torch.bfloat16}) == expected
    assert warnings(before, ["a.*=keep", "*=bf16"]) == []


def test_a_rule_for_all_leaves_float8_to_those_after_it() -> None:
    before = catalog(w="float8_e4m3fn", v="float32")
    assert dtypes(before, ["bf16", "w=f32"]) == ["float32", "bfloat16"]
    assert warnings(before, ["bf16", "w=f32"]) == []


def test_each_rule_that_matches_no_name_is_named() -> None:
    before = catalog(a="float32")
    nothing, empty = warnings(before, ["model.*=bf16", "a=f16", "=f16"])
    assert nothing == (
        "--dtype 'model.*=bf16' (dtype=) matches none of the tensors taken: a glob must match the whole name"
    )
    assert "'=f16'" in empty


def test_a_rule_that_earlier_ones_leave_nothing_is_never_reached() -> None:
    before = catalog(a="float32", b="float16", ids="int64")
    assert warnings(before, ["a=f16", "a=bf16"]) == [
        "--dtype 'a=bf16' (dtype=) is never reached: earlier rules match all of its floats"
    ]
    assert warnings(before, {"[ab]": "f16", "*": torch.float32}) == [
        "--dtype '*=float32' (dtype=) is never reached: earlier rules match all of its floats, and int64 is not cast"
    ]
    assert warnings(before, ["a=f16", "b=f16", "a=keep"]) == [
        "--dtype 'a=keep' (dtype=) is never reached: earlier rules match all of its floats"
    ]


def test_a_rule_that_matches_nothing_that_is_cast_says_what_it_matches() -> None:
    before = catalog(q="Q8_0", k="Q6_K", ids="int64", bits="bool", w="float32")
    (named,) = warnings(before, "[qk]=f16")
    assert named == "--dtype '[qk]=f16' (dtype=) cannot apply to Q6_K, Q8_0: only floats are cast"
    (plain,) = warnings(before, "[ib]*=f16")
    assert "cannot apply to bool, int64: only floats" in plain
    assert warnings(before, "f16") == []  # it casts w
    assert warnings(catalog(q="Q8_0"), "f16")[0].startswith("--dtype 'f16' (dtype=) cannot apply to Q8_0")
    assert warnings(before, "ids=keep") == []  # and so it does


def test_a_rule_for_all_that_finds_only_float8_says_how_to_cast_it() -> None:
    (warning,) = warnings(catalog(w="float8_e4m3fn"), "bf16")
    assert "cannot apply to float8_e4m3fn" in warning
    assert "'*=bf16', casts float8 too" in warning


def test_a_rule_that_asks_for_the_dtype_that_is_there_has_what_it_wants() -> None:
    assert warnings(catalog(w="float32"), ["w=f32", "f16"])[0].startswith("--dtype 'f16' (dtype=) is never reached")
    assert warnings(catalog(w="float32"), "f32") == []


@pytest.mark.parametrize(
    "names",
    [
        # DeepSeek, compressed-tensors, ComfyUI, a flat file, and one with the scale below the weight.
        ("layer__weight", "layer__weight_scale_inv"),
        ("layer__weight", "layer__input_scale"),
        ("layer__weight", "layer__scale_weight"),
        ("w", "w_scale_inv"),
        ("layer__w", "layer__w__scale"),
    ],
)
def test_scales_that_are_rounded_beside_float8_that_stays_are_named(names: tuple[str, str]) -> None:
    weight, scale = names
    before = catalog(**{weight: "float8_e4m3fn", scale: "float32", "other__scale": "float32", "norm": "float32"})
    (warning,) = warnings(before, "bf16")
    assert f"leaves float8 as it is (1 tensor, '{weight.replace('__', '.')}')" in warning
    assert f"rounds '{scale.replace('__', '.')}', which seem" in warning
    assert "'*scale*=keep' before it keeps them, '*=bf16' instead casts float8 too" in warning
    assert warnings(before, ["*scale*=keep", "bf16"]) == []
    assert warnings(before, "*=bf16") == []


def test_scales_that_lose_nothing_are_not_mentioned() -> None:
    assert warnings(catalog(w="float8_e4m3fn", w_scale="float16", x="float32"), "f32") == []
    assert warnings(catalog(w="float8_e4m3fn", w_scale="float32", x="float16"), "f32") == []
    assert len(warnings(catalog(w="float8_e4m3fn", w_scale="float16"), "bf16")) == 1
