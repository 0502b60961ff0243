"""The forecast says what the conversion then does, and reads no tensor data for it."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import stream_pack
from stream_pack.errors import LimitError
from stream_pack.format.catalog import Catalog
from stream_pack.format.header_kinds import MPS, PTD, XNNPACK, Front
from stream_pack.writer.plan import warnings_of
from stream_pack.writer.report import Forecast, Report
from tests.sources.byte_sources import Dribble
from tests.support.spools import without_a_folder
from tests.support.torch_zips import records, saved


def tensors() -> dict[str, torch.Tensor]:
    w = torch.arange(30_000.0).reshape(300, 100)
    return {
        "w": w,
        "tied": w,
        "view": w[1:3],
        "rest": torch.arange(5000.0)[1000:],
        "t": torch.arange(600.0).reshape(20, 30).t(),
        "ids": torch.arange(7),
    }


def assert_foretold(forecast: Forecast, report: Report) -> None:
    for field in dataclasses.fields(Forecast):
        if field.name not in ("buffers", "peak_memory_nbytes"):
            assert getattr(forecast, field.name) == getattr(report, field.name), field.name


@pytest.mark.parametrize(
    ("front", "most"), [(MPS, 499_999), (XNNPACK, 999_998), (PTD, 333_333)], ids=["mps", "xnnpack", "ptd"]
)
def test_tensors_that_a_verifier_would_refuse_are_warned_of(front: Front, most: int) -> None:
    # FlatBuffers' C++ Verifier visits a million tables by default.  docs/FORMAT.md, section 9.
    catalog = MagicMock(Catalog, notes=())
    catalog.__len__.return_value = most
    assert warnings_of(catalog, front) == ()
    catalog.__len__.return_value = most + 1
    (warning,) = warnings_of(catalog, front)
    assert f"refuse a graph above {most}" in warning


@pytest.mark.parametrize("dtype", [None, "bf16", "f64"])
def test_it_says_what_the_report_says_afterwards(dtype: str | None, tmp_path: Path) -> None:
    data = saved(tensors())
    (tmp_path / "model.pt").write_bytes(data)
    for make in (lambda: tmp_path / "model.pt", lambda: Dribble(data, step=1000), tensors):
        forecast = stream_pack.forecast(make(), dtype=dtype, metadata={"k": "v"})
        report = stream_pack.convert(make(), tmp_path / "pack", dtype=dtype, metadata={"k": "v"})
        assert_foretold(forecast, report)
        assert forecast.target_nbytes == (tmp_path / "pack").stat().st_size
        assert forecast.buffers == 5  # w and tied share one; the view's start, byte 400, is not aligned


@pytest.mark.usefixtures("spools_on_disk")
def test_into_a_stream_it_foretells_what_has_to_wait(tmp_path: Path) -> None:
    data = saved(tensors())
    forecast = stream_pack.forecast(Dribble(data, step=1000), order="name", to_stream=True)
    report = stream_pack.convert(Dribble(data, step=1000), io.BytesIO(), order="name", spool_dir=tmp_path)
    # By name: ids, rest, t, tied, view, w.  By the time ids comes, last, all others wait; t was spooled before.
    assert report.spool_nbytes <= forecast.spool_nbytes
    assert forecast.spool_nbytes == 4 * (30_000 + 200 + 4000 + 600) + 2400


@pytest.mark.usefixtures("spools_on_disk")
def test_what_waits_at_most_counts_not_what_waits_last(tmp_path: Path) -> None:
    # c waits for a, then e for d.
    given = {"c": torch.arange(100.0), "a": torch.ones(1), "e": torch.ones(5), "d": torch.ones(1)}
    data = saved(given)
    forecast = stream_pack.forecast(Dribble(data, step=1000), order="name", to_stream=True)
    assert forecast.spool_nbytes == 400
    target = io.BytesIO()
    report = stream_pack.convert(Dribble(data, step=1000), target, order="name", spool_dir=tmp_path)
    assert report.spool_nbytes == 400


@pytest.mark.usefixtures("spools_on_disk")
def test_of_a_compressed_file_the_order_of_its_records_is_known(tmp_path: Path) -> None:
    given = {"a": torch.arange(1000.0), "b": torch.arange(500.0), "c": torch.arange(7.0)}
    parts = records(saved(given))
    storages = [name for name in parts if name.startswith("data/")]
    path = tmp_path / "deflated.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in [*(name for name in parts if name not in storages), *reversed(storages)]:
            archive.writestr(f"archive/{name}", parts[name])
    # c and b come before a, and wait for it.
    assert stream_pack.forecast(path, to_stream=True).spool_nbytes == 4 * (500 + 7)
    target = io.BytesIO()
    with without_a_folder(), pytest.raises(LimitError, match="--spool-dir"):
        stream_pack.convert(path, target)
    assert target.getvalue() == b""
    report = stream_pack.convert(path, target, spool_dir=tmp_path)
    assert report.spool_nbytes == 4 * (500 + 7)
    stream_pack.convert(given, tmp_path / "pack")
    assert target.getvalue() == (tmp_path / "pack").read_bytes()


def test_of_a_pipe_only_the_head_is_read() -> None:
    data = saved({"w": torch.arange(1_000_000.0)})
    pipe = Dribble(data, step=100)
    assert stream_pack.forecast(pipe).tensors == 1
    assert pipe.taken <= data.index(torch.arange(3.0).numpy().tobytes()) + 100


def test_what_the_conversion_would_refuse_is_refused() -> None:
    with pytest.raises(LimitError, match="--allow-blowup"):
        stream_pack.forecast({"x": torch.ones(1).expand(1 << 40)})
    with pytest.raises(LimitError, match="max_memory"):
        stream_pack.forecast(tensors(), max_memory=1)


def test_the_table_adds_up_to_the_pack() -> None:
    forecast = stream_pack.forecast(tensors(), dtype="bf16")
    lines = forecast.to_text().splitlines()
    assert lines[0] == "6 tensors (1 tied or views) in 5 buffers"
    assert lines[1] == "cast float32 -> bfloat16: 5 tensors"
    rows = [(line[:32].strip(), int(line[32:].split()[0])) for line in lines[2:]]
    total = [label for label, _ in rows].index("= pack")
    assert sum(nbytes for _, nbytes in rows[:total]) == rows[total][1] == forecast.target_nbytes
