"""What has to wait for its turn in a stream is foretold: never too little, and refused before the first byte."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.errors import LimitError, SourceError
from stream_pack.pipeline.adapt.select import Order
from stream_pack.pipeline.arrival import in_any_order, one_after_another, one_pass, waiting_nbytes
from tests.sources.byte_sources import Dribble
from tests.support.spools import on_disk, without_a_folder
from tests.support.torch_zips import records, repacked, saved

W = torch.arange(30_000.0).reshape(150, 200)
FLAT = W.view(-1)


def waiting(*buffers: tuple[int, int, int], derived: dict[int, tuple[int, int, int]], chunk_nbytes: int = 1) -> int:
    storages, starts, nbytes = np.array(buffers, np.int64).T
    arrival = one_pass(storages, starts, nbytes, derived, chunk_nbytes=chunk_nbytes)
    return waiting_nbytes(arrival, nbytes)


def test_what_waits_is_what_begins_before_all_in_front_of_it_are_complete() -> None:
    assert waiting((0, 0, 5), (0, 5, 7), (1, 0, 3), derived={}) == 0
    assert waiting((0, 0, 5), (0, 3, 7), (1, 0, 3), derived={}) == 7  # the second shares bytes
    assert waiting((1, 0, 3), (0, 0, 5), derived={}) == 5
    # What is made from storage 0 comes behind all of it; the second of two waits for no one.
    assert waiting((0, 0, 5), (7, 0, 9), (8, 0, 9), derived={7: (0, 0, 5), 8: (0, 0, 5)}) == 0
    assert waiting((7, 0, 9), (0, 0, 5), derived={7: (0, 0, 5)}) == 5
    # What waits for different buffers is not added up: 4 leaves when 2 come, 8 waits later.
    assert waiting((1, 0, 1), (0, 0, 4), (3, 0, 1), (2, 0, 8), derived={}) == 8


def test_overlapping_buffers_wait_only_where_a_chunk_ends_between_them() -> None:
    first, second = (0, 0, 50), (0, 30, 70)
    assert waiting(first, second, derived={}, chunk_nbytes=100) == 0
    assert waiting(first, second, derived={}, chunk_nbytes=50) == 0
    assert waiting(first, second, derived={}, chunk_nbytes=40) == 70  # 40 to 50 come in the second
    assert waiting(second, first, derived={}, chunk_nbytes=100) == 50  # the one that starts first comes first
    # Of what is gathered nobody knows the chunks.
    gathered = ((7, 0, 50), (7, 30, 70))
    assert waiting(*gathered, derived={7: (0, 0, 100)}, chunk_nbytes=1000) == 70


def test_where_no_order_is_known_all_wait_for_the_first() -> None:
    assert waiting_nbytes(in_any_order(3), np.array([5, 3, 4])) == 7
    assert waiting_nbytes(in_any_order(1), np.array([5])) == 0


def test_nothing_waits_where_the_source_keeps_to_the_turn() -> None:
    assert waiting_nbytes(one_after_another(3), np.array([1, 2, 3])) == 0
    assert waiting_nbytes(one_after_another(0), np.array([], np.int64)) == 0


def legacy(tensors: dict[str, torch.Tensor]) -> bytes:
    return saved(tensors, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [saved, legacy])
@pytest.mark.parametrize(
    ("tensors", "nbytes"),
    [
        ({"a": FLAT[:20_000], "b": FLAT[10_001:]}, 4 * 19_999),  # b begins before a is complete
        ({"t": W.t(), "w": W}, 2 * 4 * 30_000),  # t is gathered at the end, and all of w waits for it
        ({"w": W, "t": W.t()}, 4 * 30_000),  # gathered when w has passed
    ],
    ids=["overlapping", "gathered first", "gathered last"],
)
@pytest.mark.usefixtures("spools_on_disk")
def test_views_of_one_storage_are_foretold(
    tensors: dict[str, torch.Tensor], nbytes: int, save: Callable[[dict[str, torch.Tensor]], bytes], tmp_path: Path
) -> None:
    data = save(tensors)
    forecast = stream_pack.forecast(Dribble(data, step=999), to_stream=True, chunk_nbytes=4096)
    assert forecast.spool_nbytes == nbytes
    target = io.BytesIO()
    with without_a_folder(), pytest.raises(LimitError, match="--spool-dir") as caught:
        stream_pack.convert(Dribble(data, step=999), target, chunk_nbytes=4096)
    assert caught.value.value == nbytes
    assert target.getvalue() == b""
    report = stream_pack.convert(Dribble(data, step=999), target, spool_dir=tmp_path, chunk_nbytes=4096)
    # Of what overlaps, only what came before its turn did wait.
    assert nbytes // 3 < report.spool_nbytes <= nbytes


def test_overlapping_views_in_a_compressed_file_are_foretold(tmp_path: Path) -> None:
    path = tmp_path / "deflated.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in records(saved({"a": FLAT[:20_000], "b": FLAT[10_001:]})).items():
            made.writestr(f"archive/{name}", data)
    target = io.BytesIO()
    with without_a_folder(), pytest.raises(LimitError, match="--spool-dir"):
        stream_pack.convert(path, target, chunk_nbytes=4096)
    assert target.getvalue() == b""


def test_overlapping_views_shorter_than_a_chunk_need_no_disk(tmp_path: Path) -> None:
    """Compressed or not: whole chunks come either way."""
    data = saved({"a": FLAT[:20_000], "b": FLAT[10_001:]})
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        for name, record in records(data).items():
            made.writestr(f"archive/{name}", record)
    packs = set()
    for source in (data, target.getvalue(), legacy({"a": FLAT[:20_000], "b": FLAT[10_001:]})):
        assert stream_pack.forecast(Dribble(source, step=999), to_stream=True).spool_nbytes == 0
        pack = io.BytesIO()
        assert stream_pack.convert(Dribble(source, step=999), pack).spool_nbytes == 0
        packs.add(pack.getvalue())
    assert len(packs) == 1


def archived(tensors: dict[str, torch.Tensor], order: list[int], *, version: bool) -> bytes:
    """The storages in this order; ``version``: with the record that torch writes since it no longer sorts them."""
    parts = records(saved(tensors))
    before = [".format_version"] * version
    names = ["data.pkl", *before, *(f"data/{key}" for key in order), "version"]
    return repacked({name: parts[name] for name in names})


@pytest.mark.parametrize(
    ("version", "order", "nbytes"),
    [
        (True, list(range(12)), 0),
        # torch before 2.6: 0, 1, 10, 11, 2 ...; the last two wait until all others have come.
        (False, [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9], 2000),
        # Packed again by another program, whose order shows at once: all but the first may have to wait.
        (True, list(range(11, -1, -1)), 11_000),
        (False, list(range(11, -1, -1)), 11_000),
    ],
)
@pytest.mark.usefixtures("spools_on_disk")
def test_of_a_pipe_the_order_is_that_of_the_version_of_torch_that_wrote_it(
    version: bool, order: list[int], nbytes: int, tmp_path: Path
) -> None:
    tensors = {f"t{k}": torch.full((250,), float(k)) for k in range(12)}
    data = archived(tensors, order, version=version)
    assert stream_pack.forecast(Dribble(data, step=999), to_stream=True).spool_nbytes == nbytes
    target = io.BytesIO()
    if nbytes:
        with without_a_folder(), pytest.raises(LimitError, match="--spool-dir"):
            stream_pack.convert(Dribble(data, step=999), target)
    report = stream_pack.convert(Dribble(data, step=999), target, spool_dir=tmp_path if nbytes else None)
    assert report.spool_nbytes == nbytes
    stream_pack.convert(tensors, tmp_path / "pack")
    assert target.getvalue() == (tmp_path / "pack").read_bytes()


def test_what_leaves_at_a_tick_makes_room_for_what_begins_at_it() -> None:
    # Buffer 1 waits for buffer 0 until tick 5; buffer 3 comes then, and waits for buffer 2.
    begins, ends = np.array([0, 0, 6, 5]), np.array([5, 2, 8, 6])
    assert waiting_nbytes((begins, ends), np.array([1, 10, 1, 20])) == 20


VIEWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "transposed": lambda x, _: x.t() if x.dim() == 2 else x,
    "tail": lambda x, n: x[n % (len(x) + 1) :] if x.dim() else x,
    "head": lambda x, n: x[: n % (len(x) + 1)] if x.dim() else x,
    "every other": lambda x, _: x[..., ::2] if x.dim() else x,
    "row": lambda x, n: x[n % len(x)] if x.dim() and len(x) else x,
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 400)), max_size=3)
BASES = [W[:40, :30].clone(), torch.arange(900).half(), torch.arange(2001.0).double()]


@given(
    st.lists(st.tuples(st.integers(0, 2), STEPS), min_size=1, max_size=7),
    st.booleans(),
    st.sampled_from(["source", "name"]),
    st.sampled_from([None, "f64", "bf16", ["*[ab]=f16"]]),
    st.sampled_from([None, "[a-d]"]),
    st.sampled_from([1 << 16, 512, 97]),
)
def test_the_forecast_is_never_too_little(
    views: list[tuple[int, list[tuple[str, int]]]],
    old: bool,
    order: Order,
    dtype: object,
    exclude: str | None,
    chunk_nbytes: int,
) -> None:
    tensors = {}
    for number, (base, steps) in enumerate(views):
        tensor = BASES[base]
        for step, n in steps:
            tensor = VIEWS[step](tensor, n)
        tensors["geacfbd"[number]] = tensor
    data = legacy(tensors) if old else saved(tensors)
    with on_disk():
        assert_forecast_is_enough(data, order, dtype, exclude, chunk_nbytes)


def assert_forecast_is_enough(data: bytes, order: Order, dtype: object, exclude: str | None, chunk_nbytes: int) -> None:
    target = io.BytesIO()
    try:
        forecast = stream_pack.forecast(
            Dribble(data, step=1000),
            to_stream=True,
            order=order,
            dtype=dtype,
            exclude=exclude,
            allow_blowup=True,
            chunk_nbytes=chunk_nbytes,
        )
    except SourceError:  # all of them are left out
        return
    with TemporaryDirectory() as folder:
        report = stream_pack.convert(
            Dribble(data, step=1000),
            target,
            order=order,
            dtype=dtype,
            exclude=exclude,
            allow_blowup=True,
            chunk_nbytes=chunk_nbytes,
            spool_dir=folder if forecast.spool_nbytes else None,
        )
    assert report.spool_nbytes <= forecast.spool_nbytes
    assert report.target_nbytes == len(target.getvalue()) == forecast.target_nbytes
    if forecast.spool_nbytes:
        target = io.BytesIO()
        with without_a_folder(), pytest.raises(LimitError, match="--spool-dir"):
            stream_pack.convert(
                Dribble(data, step=1000),
                target,
                order=order,
                dtype=dtype,
                exclude=exclude,
                allow_blowup=True,
                chunk_nbytes=chunk_nbytes,
            )
        assert target.getvalue() == b""
