"""Every byte of a source is read once, counted by the kernel; what no tensor needs, not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack

IO = Path("/proc/self/io")
NBYTES = 24 << 20
SLACK = 512 << 10
"""A read-ahead of 64 KiB for each jump, and what the rest of the process reads meanwhile."""

pytestmark = pytest.mark.skipif(not IO.exists(), reason="reads are counted by Linux's /proc")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    big = torch.empty(NBYTES // 4 - 3000, dtype=torch.int32).random_(generator=generator)
    # Tied, and one of no bytes.
    return {"big": big, "tied": big, "none": torch.empty(0), "small": torch.arange(3000)}


def torch_zip(path: Path) -> None:
    torch.save(tensors(), path)


def torch_legacy(path: Path) -> None:
    torch.save(tensors(), path, _use_new_zipfile_serialization=False)


def safetensors_file(path: Path) -> None:
    kept = tensors()
    del kept["tied"]
    safetensors.torch.save_file(kept, path)


def pack(path: Path) -> None:
    stream_pack.save_file(tensors(), path)


def gguf_file(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("big", tensors()["big"].view(torch.float32).numpy())
    writer.add_tensor("small", np.arange(3000, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = [torch_zip, torch_legacy, safetensors_file, pack, gguf_file]


def nbytes_read(action: Callable[[], object]) -> int:
    """Bytes that the system calls of this process gave, the page cache's included."""

    def count() -> int:
        (line,) = [line for line in IO.read_text().splitlines() if line.startswith("rchar:")]
        return int(line.split()[1])

    before = count()
    action()
    return count() - before


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    request.param(path)
    # Once before counting: modules are imported from files too.
    stream_pack.convert(path, tmp_path / "warm")
    (tmp_path / "warm").unlink()
    return path


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("to", ["file", "stream"])
def test_a_conversion_reads_every_byte_once(source: Path, tmp_path: Path, to: str, jobs: int) -> None:
    def convert() -> None:
        if to == "file":
            stream_pack.convert(source, tmp_path / "target", jobs=jobs)
        else:
            with open(tmp_path / "target", "wb") as target:
                stream_pack.convert(source, target, jobs=jobs)

    nbytes = source.stat().st_size
    assert nbytes > NBYTES - SLACK
    assert nbytes - SLACK < nbytes_read(convert) < nbytes + SLACK


@pytest.mark.parametrize(("to", "times"), [("file", 1), ("stream", 2)])
def test_views_that_share_blocks_of_a_pack_do_not_read_them_for_each(to: str, times: int, tmp_path: Path) -> None:
    """A stream takes the views in turn: a block is proved for the first, and read where it is wanted for the others."""
    base = torch.arange(NBYTES // 4, dtype=torch.int32)
    parts = base.reshape(-1, 16384)  # 64 KiB each, 64 of them a block
    views = {f"v{k}": parts[k * 37 % len(parts)] for k in range(len(parts))}
    stream_pack.save_file({"base": base, **views}, tmp_path / "source")

    def convert() -> None:
        if to == "file":
            stream_pack.convert(tmp_path / "source", tmp_path / "target", include="v*")
        else:
            with open(tmp_path / "target", "wb") as target:
                stream_pack.convert(tmp_path / "source", target, include="v*")

    convert()  # once before counting, as above
    assert nbytes_read(convert) < times * NBYTES + SLACK
    with stream_pack.open(tmp_path / "target") as pack:
        assert all(np.array_equal(pack[name].numpy(), view) for name, view in views.items())


def test_a_forecast_reads_no_tensor(source: Path) -> None:
    assert nbytes_read(lambda: stream_pack.forecast(source)) < SLACK


def test_the_count_is_that_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    assert 2 << 20 <= nbytes_read(lambda: path.read_bytes() + path.read_bytes()) < (2 << 20) + SLACK
