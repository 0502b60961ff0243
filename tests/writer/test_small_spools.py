"""Little that has to wait does so in memory, within the budget; more goes to disk: where, and with which words."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack.pipeline.spool import MEMORY_NBYTES
from tests.sources.byte_sources import Dribble
from tests.support.spools import needs_memory_files, on_disk
from tests.support.torch_zips import saved
from tests.writer.test_disk_space import Watch

SMALL = {"b": torch.arange(60_000.0).reshape(200, 300).t(), "a": torch.arange(50_000.0)}
"""From a pipe both wait if they are sorted: b until a is complete, and its storage until it is gathered."""

WAITING_NBYTES = 2 * 240_000

pytestmark = needs_memory_files


@pytest.fixture
def pack(tmp_path: Path) -> bytes:
    stream_pack.convert(SMALL, tmp_path / "wanted", order="name")
    data = (tmp_path / "wanted").read_bytes()
    (tmp_path / "wanted").unlink()
    return data


def test_a_pipe_to_a_pipe_needs_no_option_and_no_disk(pack: bytes, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "stream_pack", "convert", "--order", "name", "-", "-"]
    nowhere = {**os.environ, "TMPDIR": str(tmp_path / "gone")}
    done = subprocess.run(argv, input=saved(SMALL), capture_output=True, check=True, cwd=tmp_path, env=nowhere)
    assert done.stdout == pack
    (summary,) = done.stderr.decode().splitlines()
    assert "spool" not in summary
    assert os.listdir(tmp_path) == []


def test_what_waits_in_memory_takes_no_disk_and_is_part_of_the_peak_that_is_predicted(pack: bytes) -> None:
    lines: list[str] = []
    target = io.BytesIO()
    data = saved(SMALL)
    report = stream_pack.convert(Dribble(data, step=999), target, order="name", announce=lines.append)
    assert target.getvalue() == pack
    assert (report.spool_nbytes, lines) == (0, [])
    forecast = stream_pack.forecast(Dribble(data, step=999), order="name", to_stream=True)
    with on_disk():
        spooled = stream_pack.forecast(Dribble(data, step=999), order="name", to_stream=True)
    assert (forecast.spool_nbytes, spooled.spool_nbytes) == (0, WAITING_NBYTES)
    more = forecast.peak_memory_nbytes - spooled.peak_memory_nbytes
    assert more == pytest.approx(WAITING_NBYTES, abs=WAITING_NBYTES // 2)  # the process's own pages move, too


def test_above_the_bound_everything_goes_to_the_folder_of_the_system_for_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nbytes = MEMORY_NBYTES + 4
    given = {"b": torch.arange(nbytes // 4, dtype=torch.int32), "a": torch.ones(1)}
    watch = Watch(tmp_path)
    lines: list[str] = []
    with open(os.devnull, "wb") as target:
        report = stream_pack.convert(
            Dribble(saved(given), step=1 << 20), target, order="name", progress=watch, announce=lines.append
        )
    assert report.spool_nbytes == nbytes
    assert watch.spools
    assert not watch.elsewhere
    (line,) = lines
    assert line.endswith(f"using up to 16.0 MiB of disk space temporarily in {tmp_path}")
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("spools_on_disk")
def test_a_folder_for_spools_comes_before_that_of_the_target(tmp_path: Path) -> None:
    spools, packs = tmp_path / "spools", tmp_path / "packs"
    spools.mkdir()
    packs.mkdir()
    watch = Watch(spools)
    given = {f"t{k}": torch.arange(6_000_000, dtype=torch.int16).reshape(2000, 3000).t() for k in range(2)}
    stream_pack.convert(Dribble(saved(given), step=1 << 20), packs / "pack", spool_dir=spools, progress=watch)
    assert watch.spools
    assert not watch.elsewhere
    assert (os.listdir(spools), os.listdir(packs)) == ([], ["pack"])


def dry_run(source: bytes, max_memory: int) -> subprocess.CompletedProcess[bytes]:
    """In a process of its own: what this one holds changes from call to call."""
    argv = [sys.executable, "-m", "stream_pack", "convert", "--order", "name", "--dry-run", "--json", "-", "-"]
    return subprocess.run([*argv, "--max-memory", str(max_memory)], input=source, capture_output=True, check=False)


def test_under_a_limit_what_waits_is_in_memory_only_if_it_fits() -> None:
    nbytes = 12 << 20
    data = saved({"b": torch.arange(nbytes // 4, dtype=torch.int32), "a": torch.ones(1)})
    limit = 1
    while refused := re.search(rb"at least (\d+) bytes of memory", dry_run(data, limit).stderr):
        assert int(refused[1]) > limit  # each step of the way names its own least
        limit = int(refused[1])
    for spare, spooled in ((nbytes // 2, nbytes), (2 * nbytes, 0)):
        assert json.loads(dry_run(data, limit + spare).stdout)["spool_nbytes"] == spooled


def test_under_a_limit_an_archive_of_unknown_length_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    from tests.sources.torch_save.test_repacked import reordered

    data = reordered("pickle last")
    source = [Dribble(data, step=99) for _ in range(2)]
    assert stream_pack.convert(source[0], io.BytesIO()).spool_nbytes == 0
    assert stream_pack.convert(source[1], io.BytesIO(), max_memory=1 << 40).spool_nbytes == len(data)
