"""Named data in a block: what ExecuTorch's store has is on disk, and merged as it always merges."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch import exir
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir._serialize import _cord
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize.data_serializer import DataPayload
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

from stream_pack.errors import StateError
from stream_pack.executorch import streaming_constants
from stream_pack.executorch.export.placeholder import held_in

LONG = bytes(range(256)) * 40
OTHER = LONG[:-1] + b"\0"
SHORT = b"short"


@pytest.fixture
def block(tmp_path: Path) -> Iterator[None]:
    with streaming_constants(tmp_path, alignment="stock"):
        yield


def content(value: Any) -> bytes:
    """The real bytes that one of a store's buffers stands for."""
    held = held_in(value)
    return value if held is None else held.read(0, held.nbytes)


def filled() -> NamedDataStore:
    """Equal data under two names, data that differ at the end only, and a file's."""
    store = NamedDataStore()
    store.add_named_data("one", LONG, alignment=16)
    store.add_named_data("same", LONG, alignment=16)
    store.add_named_data("one", LONG, alignment=16)
    store.add_named_data("other", OTHER)
    store.add_named_data("short", SHORT, 1, "tag")
    store.add_named_data("alias", bytes(LONG), 1, "tag")
    return store


@pytest.mark.usefixtures("block")
def test_equal_data_are_one_buffer_and_others_are_not() -> None:
    output = filled().get_named_data_store_output()
    assert [content(buffer) for buffer in output.buffers] == [LONG, OTHER, SHORT]
    assert [held_in(buffer) is None for buffer in output.buffers] == [False, False, True]
    places = {key: entry.buffer_index for key, entry in output.pte_data.items()}
    assert places == {"one": 0, "same": 0, "other": 1}
    tagged = {key: entry.buffer_index for key, entry in output.external_data["tag"].items()}
    assert tagged == {"short": 2, "alias": 0}


@pytest.mark.usefixtures("block")
def test_one_name_for_different_data_is_refused_as_always() -> None:
    store = filled()
    with pytest.raises(ValueError, match="Duplicate key one with different data"):
        store.add_named_data("one", OTHER)


@pytest.mark.usefixtures("block")
def test_stores_merge_as_always() -> None:
    merged = NamedDataStore()
    for _ in range(2):
        merged.merge_named_data_store(filled().get_named_data_store_output())
    assert [content(buffer) for buffer in merged.buffers] == [LONG, OTHER, SHORT]


def test_data_that_came_before_the_block_merge_with_those_in_it(tmp_path: Path) -> None:
    before = filled().get_named_data_store_output()
    with streaming_constants(tmp_path):
        store = filled()
        store.merge_named_data_store(before)
    assert [content(buffer) for buffer in store.buffers] == [LONG, OTHER, SHORT]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3000.0).reshape(30, 100),
        lambda: torch.arange(3000.0).to(torch.bfloat16),
        lambda: torch.arange(6000.0).reshape(5, 12, 10, 10).to(memory_format=torch.channels_last),
        lambda: torch.arange(10),
        lambda: torch.tensor(2.5),
    ],
    ids=["fp32", "bf16", "channels last", "short", "rank 0"],
)
def test_tensors_are_stored_as_always(make: Any, tmp_path: Path) -> None:
    stock, ours = NamedDataStore(), NamedDataStore()
    stock.add_named_data("t", make())
    with streaming_constants(tmp_path):
        ours.add_named_data("t", make())
    assert content(ours.buffers[0]) == stock.buffers[0]
    assert ours.pte_data == stock.pte_data


@pytest.mark.usefixtures("block")
def test_a_tensor_that_is_a_view_is_stored_without_its_neighbours() -> None:
    numbers = np.arange(12000, dtype="<f4")
    rows = torch.from_numpy(numbers.reshape(120, 100))
    images = torch.from_numpy(numbers.reshape(10, 10, 10, 12)).permute(0, 3, 1, 2)
    store = NamedDataStore()
    store.add_named_data("rows", rows[60:])
    store.add_named_data("images", images[7:])
    assert content(store.buffers[0]) == numbers[6000:].tobytes()
    assert content(store.buffers[1]) == numbers[8400:].tobytes()


def test_a_flat_tensor_file_is_the_one_that_executorch_writes(tmp_path: Path) -> None:
    def cord() -> Any:
        store = filled()
        data = {**store.pte_data, **store.external_data["tag"]}
        return FlatTensorSerializer().serialize(DataPayload(store.buffers, data))

    stock = bytes(cord())
    with streaming_constants(tmp_path):
        ours = cord()
        assert bytes(ours) == stock
    file = io.BytesIO()
    ours.write_to_file(file)
    assert file.getvalue() == bytes(ours) == stock
    assert FlatTensorSerializer().deserialize(ours).buffers == [LONG, OTHER, SHORT]


def test_what_stands_for_data_is_copied_as_itself_and_not_pickled(tmp_path: Path) -> None:
    with streaming_constants(tmp_path):
        (buffer, *_) = filled().buffers
    assert copy.deepcopy(buffer) is buffer
    assert copy.copy(buffer) is buffer
    with pytest.raises(StateError, match="write_program"):
        pickle.dumps(buffer)


def test_a_lowered_module_and_a_saved_edge_program_have_the_real_data(tmp_path: Path) -> None:
    def lowered() -> Any:
        torch.manual_seed(4)
        program = torch.export.export(torch.nn.Linear(64, 64), (torch.ones(2, 64),))
        manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        return manager.exported_program()

    def module(program: Any) -> Any:
        return program.graph_module.lowered_module_0

    def saved(program: Any) -> Any:
        file = io.BytesIO()
        exir.save(program, file)
        return module(exir.load(file)).named_data_store_output

    stock = lowered()
    with streaming_constants(tmp_path, alignment="stock"):
        ours = lowered()
        assert module(ours).buffer() == module(stock).buffer()
        assert saved(ours) == module(stock).named_data_store_output
    for program in (ours, copy.deepcopy(ours)):
        assert module(program).buffer() == module(stock).buffer()
        assert saved(program) == module(stock).named_data_store_output


if hasattr(_cord, "FileBackedData"):  # from 1.5 on

    @pytest.mark.usefixtures("block")
    def test_a_file_of_the_caller_s_merges_with_equal_data(tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(LONG)
        store = filled()
        store.add_named_data("file", _cord.FileBackedData(str(tmp_path / "data")))
        assert store.pte_data["file"].buffer_index == 0

    def test_data_on_disk_are_file_backed_data_also_after_the_block(tmp_path: Path) -> None:
        with streaming_constants(tmp_path):
            (data, *_) = filled().buffers
        file = io.BytesIO()
        with data:
            data.write_to_file(file)
        assert isinstance(data, _cord.FileBackedData)
        assert file.getvalue() == data.to_bytes() == bytes(_cord.Cord(data)) == LONG
        assert data.prefix(300) == LONG[:300]
        assert data.prefix(99_999) == LONG
        assert len(data) == len(LONG)

else:

    def test_data_cannot_be_taken_for_real_ones_after_the_block(tmp_path: Path) -> None:
        with streaming_constants(tmp_path):
            store = filled()
        with pytest.raises(StateError, match="write_program"):
            NamedDataStore().merge_named_data_store(store.get_named_data_store_output())
        with pytest.raises(StateError, match="write_program"):
            FlatTensorSerializer().serialize(DataPayload(store.buffers, store.pte_data))
