"""What the plan makes of tensors that are cast."""

from __future__ import annotations

import pytest

from stream_pack.errors import LimitError
from stream_pack.format.catalog import Catalog, CatalogBuilder
from stream_pack.format.dtypes import BY_NAME, DTYPES
from stream_pack.format.layout import Policy, plan
from stream_pack.pipeline.adapt.cast_plan import CastStorages, cast_catalog, count_casts
from stream_pack.pipeline.adapt.cast_rules import cast_rules, cast_targets

MIB = 1 << 20


def catalog(*tensors: tuple[str, str, tuple[int, ...], int, int], storages_nbytes: int = 0) -> Catalog:
    """From (name, dtype, shape, storage, start)."""
    builder = CatalogBuilder()
    for name, dtype, shape, storage, start in tensors:
        builder.add(name, BY_NAME[dtype], shape, storage=storage, start=start)
    return builder.build(storages_nbytes=storages_nbytes)


def cast_both(before: Catalog, dtype: object) -> tuple[Catalog, CastStorages]:
    targets, _ = cast_targets(before, cast_rules(dtype), before.names)
    return cast_catalog(before, targets)


def cast(before: Catalog, dtype: object) -> Catalog:
    return cast_both(before, dtype)[0]


def dtypes(of: Catalog) -> list[str]:
    return [DTYPES[number].name for number in of.dtypes.tolist()]


def test_lengths_follow_the_new_dtypes_and_empty_tensors_too() -> None:
    before = catalog(("a", "float32", (3, 5), 0, 0), ("e", "float16", (0, 5), 0, 0), ("s", "float64", (), 1, 0))
    after = cast(before, "bf16")
    assert after.nbytes.tolist() == [30, 0, 2]
    assert dtypes(after) == ["bfloat16"] * 3
    assert count_casts(after) == {"float16 -> bfloat16": 1, "float32 -> bfloat16": 1, "float64 -> bfloat16": 1}


def test_tied_tensors_stay_tied_and_others_stay_apart() -> None:
    before = catalog(
        ("a", "float32", (100,), 0, 0),
        ("b", "float32", (100,), 0, 400),
        ("tied", "float32", (4, 25), 0, 0),
        storages_nbytes=1000,
    )
    layout = plan(cast(before, "f16"), Policy())
    assert layout.tied == 1
    assert layout.index.buffer_nbytes.tolist() == [200, 200]
    assert layout.index.tensor_buffers.tolist() == [0, 1, 0]
    assert (layout.unused_nbytes, layout.repeated_nbytes, layout.cast_nbytes) == (200, 0, -400)


def test_a_view_lies_in_its_cast_host_where_the_alignment_allows_it() -> None:
    # Of a million float32, rows of 128 elements: 256 bytes as float16, 512 before.
    before = catalog(
        ("host", "float32", (1 << 20,), 0, 0),
        ("aligned", "float32", (128,), 0, 3 * 512),
        ("askew", "float32", (128,), 0, 3 * 512 + 256),
        storages_nbytes=4 * MIB,
    )
    layout = plan(cast(before, "f16"), Policy())
    assert layout.index.tensor_buffers.tolist() == [0, 0, 1]
    assert layout.index.tensor_starts.tolist() == [0, 3 * 256, 0]
    assert layout.repeated_nbytes == 512
    assert layout.cast_nbytes == -2 * MIB - 256


def test_one_storage_cast_in_two_ways_is_stored_twice() -> None:
    before = catalog(("a", "float32", (64,), 0, 0), ("b", "float32", (64,), 0, 0), storages_nbytes=256)
    layout = plan(cast(before, ["a=f16"]), Policy())
    assert layout.index.buffer_nbytes.tolist() == [128, 256]
    assert (layout.unused_nbytes, layout.repeated_nbytes, layout.cast_nbytes) == (0, 256, -128)


def test_bytes_seen_as_two_types_are_cast_as_each() -> None:
    before = catalog(
        ("f32", "float32", (8,), 0, 0),
        ("f16", "float16", (16,), 0, 0),
        ("odd", "float32", (4,), 0, 2),
        storages_nbytes=32,
    )
    after, made = cast_both(before, "f64")
    assert len(set(after.storages.tolist())) == 3
    assert after.starts.tolist() == [0, 0, 0]
    assert sorted(zip(made.begins.tolist(), made.ends.tolist())) == [(0, 32), (0, 32), (2, 18)]
    # A storage that is made from another is traced back to it.
    assert sorted(after.derived.values()) == [(0, 0, 32), (0, 0, 32), (0, 2, 18)]


def test_what_a_gathered_tensor_is_made_from_is_still_known() -> None:
    builder = CatalogBuilder()
    builder.add("t", BY_NAME["float32"], (8, 8), storage=5, start=0)
    builder.derive(5, of=0, begin=16, end=272)
    before = builder.build(storages_nbytes=300)
    after = cast(before, "f16")
    assert after.derived[int(after.storages[0])] == (0, 16, 272)
    assert plan(after, Policy()).unused_nbytes == 300 - 256


def test_what_a_cast_widens_is_no_blow_up() -> None:
    before = catalog(("w", "float16", (MIB,), 0, 0), ("v", "float16", (MIB,), 0, 2), storages_nbytes=2 * MIB + 2)
    layout = plan(cast(before, "f64"), Policy())  # 16 MiB of 2
    assert layout.cast_nbytes == 12 * MIB


def test_a_cast_beyond_the_limit_of_a_tensor_is_refused_and_does_not_wrap() -> None:
    before = catalog(("huge", "float16", (1 << 61,), 0, 0))
    with pytest.raises(LimitError, match="'huge'"):
        cast(before, "f64")
    assert cast(before, "bf16").nbytes.tolist() == [1 << 62]


def test_a_hundred_thousand_tensors_are_planned_with_one_buffer_each() -> None:
    before = catalog(*((f"t{k}", "float32", (4,), 0, 16 * k) for k in range(100_000)))
    after, made = cast_both(before, "f16")
    assert len(made.storages) == 100_000
    assert after.nbytes.sum() == 800_000
    assert count_casts(after) == {"float32 -> float16": 100_000}
