"""Programs made in a block, with what no delegate takes and what delegates share: every way out, used and forgotten."""

from __future__ import annotations

import copy
import gc
import io
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir._serialize import _cord
from executorch.exir._serialize._program import PTEFile, deserialize_pte_binary, serialize_pte_binary

from stream_pack.errors import StateError
from stream_pack.executorch import streaming_constants, write_program
from stream_pack.executorch.export.hooks_program import StreamedCord
from tests.executorch.programs import run, run_file

PAGE = 16384
FILE_BACKED = hasattr(_cord, "FileBackedData")  # from 1.5 on
INPUTS = (torch.tensor([[1, 7, 3]]),)


class Model(torch.nn.Module):
    """An embedding that the emitter stores, and layers whose weights XNNPACK has by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(200, 64)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(self.table(tokens))
        return result


@cache
def made() -> Any:
    torch.manual_seed(0)
    return torch.export.export(Model().eval(), INPUTS)


def lowered(*, delegated: bool = True) -> Any:
    partitioners = [XnnpackPartitioner()] if delegated else []
    return to_edge_transform_and_lower(made(), partitioner=partitioners)


@cache
def stock_of(delegated: bool) -> bytes:
    return bytes(lowered(delegated=delegated).to_executorch().buffer)


def _write_to_memory(manager: Any, path: Path) -> None:
    file = io.BytesIO()
    manager.write_to_file(file)
    path.write_bytes(file.getvalue())


def _save_pte_program(manager: Any, path: Path) -> None:
    from executorch.extension.export_util.utils import save_pte_program

    assert save_pte_program(manager, str(path)) == str(path)  # it logs what fails, and goes on


WAYS_OUT: dict[str, Callable[[Any, Path], object]] = {
    "write_program": lambda manager, path: write_program(manager, path),
    "save": lambda manager, path: manager.save(str(path)),
    "write_to_file": _write_to_memory,
    "save_pte_program": _save_pte_program,
    "buffer": lambda manager, path: path.write_bytes(manager.buffer),
    "a copy": lambda manager, path: write_program(copy.deepcopy(manager), path),
}


@pytest.mark.parametrize("delegated", [False, True])
def test_every_way_out_gives_stocks_bytes_in_the_block_and_after_it(delegated: bool, tmp_path: Path) -> None:
    path = tmp_path / "program.pte"
    found = {}
    with streaming_constants(tmp_path, alignment="stock"):
        manager = lowered(delegated=delegated).to_executorch()
        assert isinstance(manager._pte_data, StreamedCord)
        for way, write in WAYS_OUT.items():
            write(manager, path)
            found[way, "inside"] = path.read_bytes()
            path.unlink()
    manager._buffer = None  # what ExecuTorch's buffer has kept
    for way, write in WAYS_OUT.items():
        path.unlink(missing_ok=True)
        write(manager, path)
        found[way, "after"] = path.read_bytes()
    assert [case for case, data in found.items() if data != stock_of(delegated)] == []


def test_on_pages_each_segment_begins_on_one_and_the_program_runs_the_same(tmp_path: Path) -> None:
    with streaming_constants(tmp_path):
        manager = lowered().to_executorch()
    path = tmp_path / "program.pte"
    assert write_program(manager, path) == path.stat().st_size
    file = path.read_bytes()
    base = int.from_bytes(file[24:32], "little")
    weights = made().state_dict["layers.0.weight"].detach().numpy().tobytes()
    assert base % PAGE == 0
    assert file.index(weights) % PAGE == 0
    (expected,) = run(stock_of(True), INPUTS)
    for (ours,) in (run(file, INPUTS), run_file(path, INPUTS)):
        assert ours.tobytes() == expected.tobytes()


def test_an_alignment_of_the_backend_config_stays(tmp_path: Path) -> None:
    from executorch.exir import ExecutorchBackendConfig

    config = ExecutorchBackendConfig(segment_alignment=4 * PAGE)
    with streaming_constants(tmp_path, alignment="stock"):
        manager = lowered().to_executorch(config)
    assert bytes(manager.buffer) == bytes(lowered().to_executorch(config).buffer)


def test_to_executorch_after_the_block_gives_the_right_bytes_or_says_what_to_do(tmp_path: Path) -> None:
    with streaming_constants(tmp_path, alignment="stock"):
        edge = lowered()
    if FILE_BACKED:
        assert bytes(edge.to_executorch().buffer) == stock_of(True)
    else:  # nothing can stand for data that delegates share
        with pytest.raises(StateError, match="to_executorch inside of streaming_constants.*write_program"):
            edge.to_executorch()


@pytest.mark.parametrize("extract", [False, True])
def test_serializing_the_emitted_program_again_is_right_in_the_block_and_refused_after_it(
    extract: bool, tmp_path: Path
) -> None:
    def serialized(manager: Any) -> bytes:
        file = PTEFile(program=manager.executorch_program)
        return bytes(serialize_pte_binary(file, extract_delegate_segments=extract))

    with streaming_constants(tmp_path, alignment="stock"):
        manager = lowered(delegated=False).to_executorch()
        inside = serialized(manager)
    assert inside == serialized(lowered(delegated=False).to_executorch())
    with pytest.raises(StateError, match="write_program"):
        serialized(manager)


def test_a_program_without_a_block_is_written_as_well(tmp_path: Path) -> None:
    manager = lowered().to_executorch()
    assert write_program(manager, tmp_path / "program.pte") == len(stock_of(True))
    assert (tmp_path / "program.pte").read_bytes() == stock_of(True)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streaming_constants(tmp_path):
        manager = lowered().to_executorch()
    path = tmp_path / "program.pte"
    path.write_bytes(b"old")

    def full(file: Any) -> None:
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manager._pte_data, "write_to_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_program(manager, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_disk_space_is_given_back_when_the_manager_is_gone(tmp_path: Path) -> None:
    """ExecuTorch and torch keep what they have seen of an export in caches, for as long as the process lasts."""

    def open_in_folder() -> int:
        gc.collect()
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path) in os.readlink(link) for link in links if link.is_symlink())

    with streaming_constants(tmp_path):
        manager = lowered().to_executorch()
    assert open_in_folder() == 1
    del manager
    assert open_in_folder() == 0
    with pytest.raises(KeyError), streaming_constants(tmp_path):
        lowered().to_executorch()
        raise KeyError
    assert open_in_folder() == 0


def test_what_is_no_program_yet_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "program.pte"
    path.write_bytes(b"old")
    with pytest.raises(StateError, match="EdgeProgramManager.*to_executorch"):
        write_program(lowered(), path)
    assert path.read_bytes() == b"old"


class Slow(io.RawIOBase):
    """A raw file that takes 1,000 bytes at most."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data[:1000]
        return min(len(data), 1000)


def test_a_file_that_takes_a_part_gets_the_rest(tmp_path: Path) -> None:
    with streaming_constants(tmp_path, alignment="stock"):
        manager = lowered().to_executorch()
    file = Slow()
    manager.write_to_file(file)
    assert bytes(file.data) == stock_of(True)


class Full(Slow):
    """A file that takes nothing, and says so."""

    def write(self, data: Any) -> int:
        return 0


def test_a_file_that_takes_nothing_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    with streaming_constants(tmp_path):
        manager = lowered().to_executorch()
    with pytest.raises(OSError, match="wrote none"):
        manager.write_to_file(Full())


if FILE_BACKED:

    def test_file_backed_data_of_somebody_else_is_written_too(tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(b"theirs")
        cord = StreamedCord(_cord.FileBackedData(str(tmp_path / "data")))
        cord.append(b" and ours")
        assert bytes(cord) == b"theirs and ours"
        assert len(cord) == 15


def test_a_stock_cord_does_not_take_what_is_held_for_bytes(tmp_path: Path) -> None:
    with streaming_constants(tmp_path):
        manager = lowered().to_executorch()
    cord = _cord.Cord(manager._pte_data)
    with pytest.raises((TypeError, AttributeError)):
        bytes(cord)


def test_two_exports_in_one_block_do_not_touch_each_other(tmp_path: Path) -> None:
    with streaming_constants(tmp_path, alignment="stock"):
        one = lowered().to_executorch()
        two = lowered(delegated=False).to_executorch()
    assert bytes(two.buffer) == stock_of(False)
    del two
    assert bytes(one.buffer) == stock_of(True)
    assert deserialize_pte_binary(bytes(one.buffer)).program.execution_plan[0].name == "forward"
