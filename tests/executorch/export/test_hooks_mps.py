"""Exports to the MPS delegate in a block: the same programs, or right ones where ExecuTorch's are wrong."""

from __future__ import annotations

import copy
import io
import logging
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import executorch.backends.apple.mps.serialization as mps_schema
import numpy as np
import pytest
import torch
from executorch.backends.apple.mps import mps_preprocess
from executorch.backends.apple.mps.mps_preprocess import MPSBackend
from executorch.backends.apple.mps.operators.node_visitor import NodeVisitor
from executorch.backends.apple.mps.partition.mps_partitioner import MPSPartitioner
from executorch.backends.apple.mps.serialization.mps_graph_schema import MPSDataType
from executorch.backends.apple.mps.utils.mps_utils import is_parameter
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir._serialize._program import PTEFile, deserialize_pte_binary, serialize_pte_binary
from executorch.exir.backend.backend_api import to_backend
from executorch.exir.backend.backend_details import CompileSpec

import stream_pack
from stream_pack.errors import RawPayloadError, SourceError, StateError, UnsupportedTensorError
from stream_pack.executorch import streaming_constants, write_program
from tests.executorch.flatc import decoded
from tests.executorch.models import Block
from tests.support.memory import measure, needs_proc
from tests.support.mps_types import ENUM, NUMBERS, TAKEN

PAGE = 16384
MIB = 1 << 20


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The backend logs each node, and prints whole graphs."""
    level = logging.root.level
    logging.root.setLevel(logging.WARNING)
    yield
    logging.root.setLevel(level)


class Scalars(torch.nn.Module):
    """Numbers in the graph, between weights whose places they move."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x) * 2.5 + 1.0).clamp(-1.0, 3.0) * 0.5 - 7.0
        return result


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x)).relu()
        return result


class Embedding(torch.nn.Module):
    """One table, used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table(tokens))
        return result


class Views(torch.nn.Module):
    """Weights that are parts of another: rows of it, and rows that are taken for columns."""

    q: torch.Tensor
    k: torch.Tensor
    t: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        fused = torch.randn(192, 64)
        self.register_buffer("q", fused[:64])
        self.register_buffer("k", fused[64:128])
        self.register_buffer("t", fused[128:].T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.q + x @ self.k + x @ self.t


class Cumulative(torch.nn.Module):
    """An operator in the middle that MPS does not take: two delegates."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(torch.linalg.vector_norm(self.before(x), ord=3, dim=1)[:, None] * x)
        return result


Model = Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]
SOUND: dict[str, Model] = {
    "scalars": lambda: (Scalars(), (torch.randn(2, 64),)),
    "convolution": lambda: (Convolution(), (torch.randn(1, 3, 8, 8),)),
    "tied embedding": lambda: (Embedding(), (torch.tensor([[1, 7]]),)),
    "llama block": lambda: (Block(), (torch.randn(1, 7, 64),)),
    "two delegates": lambda: (Cumulative(), (torch.randn(2, 64),)),
}


def exported(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    return torch.export.export(model.eval(), tuple(inputs))


@cache
def made(name: str) -> Any:
    """The program of one of :data:`SOUND`.  Lowering it does not change it."""
    torch.manual_seed(0)
    return exported(*SOUND[name]())


def lowered(program: Any, *, fp16: bool = False) -> Any:
    partitioner = MPSPartitioner([CompileSpec("use_fp16", bytes([fp16]))])
    return to_edge_transform_and_lower(program, partitioner=[partitioner])


def manager_of(program: Any, *, fp16: bool = False) -> Any:
    return lowered(program, fp16=fp16).to_executorch()


def stock_bytes(program: Any, *, fp16: bool = False) -> bytes:
    """What ExecuTorch alone writes, were it not for the numbers that one delegate leaves behind for the next."""

    def visitors(*args: Any) -> Any:
        NodeVisitor._tensor_to_id.clear()
        return original(*args)

    original = mps_preprocess.get_node_visitors
    mps_preprocess.get_node_visitors = visitors
    try:
        return bytes(manager_of(program, fp16=fp16).buffer)
    finally:
        mps_preprocess.get_node_visitors = original


def payloads_of(program: bytes) -> list[bytes]:
    file = deserialize_pte_binary(program)
    return [bytes(delegate.data) for delegate in file.program.backend_delegate_data]


def graph_of(payload: bytes) -> dict[str, Any]:
    zero, magic, offset, _ = struct.unpack_from("<4s4sQQ", payload)
    assert (zero, magic) == (bytes(4), b"MP00")
    return decoded(payload[24:offset], mps_schema.__name__)


def constants_of(payload: bytes) -> list[bytes]:
    """The constants in the order of their ids, found as the device finds them."""
    graph = graph_of(payload)
    (begin,) = struct.unpack_from("<Q", payload, 8)
    values = [graph["mps_values"][number] for number in graph["constant_ids"]]
    places = [(begin + value["segment_offset"], value["constant_buffer_size"]) for value in values]
    return [payload[place : place + nbytes] for place, nbytes in places]


def streamed(program: Any, folder: Path, *, fp16: bool = False, alignment: Any = "page") -> bytes:
    with streaming_constants(folder, alignment=alignment):
        manager = manager_of(program, fp16=fp16)
    write_program(manager, folder / "program.pte")
    return (folder / "program.pte").read_bytes()


@cache
def stock_of(name: str, fp16: bool = False) -> bytes:
    return stock_bytes(made(name), fp16=fp16)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("name", SOUND)
def test_with_stocks_alignment_a_program_is_stocks_byte_for_byte(name: str, fp16: bool, tmp_path: Path) -> None:
    ours = streamed(made(name), tmp_path, fp16=fp16, alignment="stock")
    assert ours == stock_of(name, fp16)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("name", SOUND)
def test_on_pages_a_payload_is_a_pack_that_says_and_holds_the_same(name: str, fp16: bool, tmp_path: Path) -> None:
    file = streamed(made(name), tmp_path, fp16=fp16)
    stock = payloads_of(stock_of(name, fp16))
    ours = payloads_of(file)
    assert len(ours) == len(stock)
    for payload, other in zip(ours, stock, strict=True):
        assert constants_of(payload) == constants_of(other)
        graphs = [graph_of(payload), graph_of(other)]
        for value in (value for graph in graphs for value in graph["mps_values"]):
            del value["segment_offset"]
        assert graphs[0] == graphs[1]

        at = file.index(payload)
        assert at % PAGE == 0
        with stream_pack.open(tmp_path / "program.pte", offset=at, nbytes=len(payload)) as pack:
            pack.verify()
            assert len(pack) == len(constants_of(payload))
            assert all((at + pack[key].file_offset) % 256 == 0 for key in pack)


def test_the_constants_of_a_pack_have_the_names_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scalars()
    file = streamed(exported(model, (torch.randn(2, 64),)), tmp_path)
    (payload,) = payloads_of(file)
    with stream_pack.open(tmp_path / "program.pte", offset=file.index(payload), nbytes=len(payload)) as pack:
        for name, tensor in model.state_dict().items():
            assert torch.equal(pack[name].torch(), tensor)


def test_equal_constants_share_their_bytes_on_pages(tmp_path: Path) -> None:
    file = streamed(made("tied embedding"), tmp_path)
    (payload,) = payloads_of(file)
    table = constants_of(payload)[0]
    assert len(table) == 50 * 64 * 4
    assert payload.count(table) == 1


def test_a_large_constant_begins_on_a_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = streamed(exported(torch.nn.Linear(600, 600), (torch.randn(1, 600),)), tmp_path)
    (payload,) = payloads_of(file)
    at = file.index(payload)
    with stream_pack.open(tmp_path / "program.pte", offset=at, nbytes=len(payload)) as pack:
        assert pack["weight"].nbytes == 1_440_000
        assert (at + pack["weight"].file_offset) % PAGE == 0


@pytest.mark.parametrize("alignment", ["page", "stock"])
def test_a_view_is_stored_as_its_own_elements_where_stock_stores_others(alignment: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Views()
    program = exported(model, (torch.randn(2, 64),))
    expected = {name: tensor.contiguous().numpy().tobytes() for name, tensor in model.state_dict().items()}
    (ours,) = payloads_of(streamed(program, tmp_path, alignment=alignment))
    assert sorted(constants_of(ours)) == sorted(expected.values())
    (stock,) = payloads_of(stock_bytes(program))
    assert expected["k"] not in constants_of(stock)


@pytest.mark.parametrize(("fp16", "stored"), [(False, np.float32), (True, np.float16)])
def test_float64_is_stored_as_the_type_that_the_graph_names(fp16: bool, stored: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).double()
    program = exported(model, (torch.randn(2, 64, dtype=torch.float64),))
    (payload,) = payloads_of(streamed(program, tmp_path, fp16=fp16))
    weights = {tensor.numpy().astype(stored).tobytes() for tensor in model.state_dict().values()}
    assert weights <= set(constants_of(payload))


class Powers(torch.nn.Module):
    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(self.exponent)


def test_a_scalar_of_a_half_precision_graph_has_two_bytes(tmp_path: Path) -> None:
    program = exported(Powers(1.5), (torch.rand(3, 4).half(),))
    (payload,) = payloads_of(streamed(program, tmp_path, fp16=True))
    assert constants_of(payload) == [np.float16(1.5).tobytes()]
    (stock,) = payloads_of(stock_bytes(program, fp16=True))
    assert constants_of(stock) == [np.float32(1.5).tobytes()]


class TwoPowers(torch.nn.Module):
    """One number for two types: to ExecuTorch, 2 and 2.0 are one."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return n.pow(2), x.pow(2)


def test_a_number_is_a_constant_for_each_type_that_uses_it(tmp_path: Path) -> None:
    inputs = (torch.rand(3, 4), torch.ones(3, 4, dtype=torch.int64))
    (payload,) = payloads_of(streamed(exported(TwoPowers(), inputs), tmp_path))
    expected = {np.int64(2).tobytes(), np.float32(2).tobytes()}
    assert set(constants_of(payload)) == expected
    graph = graph_of(payload)
    for number, data in zip(graph["constant_ids"], constants_of(payload), strict=True):
        kind = graph["mps_values"][number]["datatype"]
        assert (kind, len(data)) in (("mps_data_type_float32", 4), ("mps_data_type_int64", 8))


class Scatter(torch.nn.Module):
    """ExecuTorch makes a constant of the indices that a slice is written to."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for begin in (0, 2, 0):
            x = torch.slice_scatter(x, y, dim=0, start=begin, end=begin + 2)
        return x


def test_constants_are_merged_where_they_are_equal(tmp_path: Path) -> None:
    program = exported(Scatter(), (torch.randn(4, 3), torch.randn(2, 3)))
    (payload,) = payloads_of(streamed(program, tmp_path))
    assert constants_of(payload) == [np.repeat(rows, 3).tobytes() for rows in (np.array([0, 1]), np.array([2, 3]))]


def test_constants_that_hash_alike_are_not_merged(tmp_path: Path) -> None:
    """hash(-1) == hash(-2): ExecuTorch tells constants apart by the hash of their numbers."""
    visitor, alike = NodeVisitor(None), (torch.tensor([-1, 5]), torch.tensor([-2, 5]))
    assert visitor.hash_tensor(alike[0]) == visitor.hash_tensor(alike[1])
    others = (torch.tensor([[-1], [5]]), torch.tensor([-1.0, 5.0]), torch.tensor([-1, 6]))
    with streaming_constants(tmp_path):
        keys = [visitor.hash_tensor(tensor) for tensor in (*alike, *others, alike[0].clone())]
    assert len(set(keys)) == 5
    assert keys[0] == keys[-1]


class SumToPower(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x).pow(1.5)


def test_nothing_of_one_export_reaches_the_next(tmp_path: Path) -> None:
    NodeVisitor._tensor_to_id.clear()
    programs = [exported(model, (torch.rand(3, 4),)) for model in (Powers(1.5), SumToPower())]
    for program in programs:
        (payload,) = payloads_of(streamed(program, tmp_path))
        assert constants_of(payload) == [np.float32(1.5).tobytes()]
    assert not NodeVisitor._tensor_to_id

    # Without a block, the second one has no such constant: it refers to the number that the first one gave it.
    found = [payloads_of(bytes(manager_of(program).buffer)) for program in programs]
    assert [len(constants_of(payload)) for (payload,) in found] == [1, 0]


class Later(torch.nn.Module):
    """The same power as of :class:`SumToPower`, whose exponent has a higher number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (x + x).sigmoid()
        result: torch.Tensor = x**1.5
        return result


def test_a_graph_that_would_lead_the_device_astray_ends_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = mps_preprocess.convert_to_flatbuffer

    def astray(graph: Any) -> bytes:
        graph.output_ids = [len(graph.mps_values)]
        return bytes(stock(graph))

    monkeypatch.setattr(mps_preprocess, "convert_to_flatbuffer", astray)
    with pytest.raises(SourceError, match="outputs name value 4, but it has 4 values"):
        streamed(exported(SumToPower(), (torch.rand(3, 4),)), tmp_path)


def test_verify_sees_what_stock_leaves_behind_for_the_next_export(tmp_path: Path) -> None:
    NodeVisitor._tensor_to_id.clear()
    path = tmp_path / "program.pte"
    for model, sound in ((Later(), True), (SumToPower(), False)):
        path.write_bytes(bytes(manager_of(exported(model, (torch.rand(3, 4),))).buffer))
        if sound:
            with pytest.raises(RawPayloadError, match="no fault was seen"):
                stream_pack.verify(path)
            continue
        (damage,) = stream_pack.verify(path).damages
        assert damage.message.startswith("the payload of 'forward/0': the graph's node ")
        assert "(MPSPow) names value 17, and the graph has 3" in damage.message
    NodeVisitor._tensor_to_id.clear()


def test_delegates_of_one_program_have_constants_of_their_own(tmp_path: Path) -> None:
    """The norms of a block square their input, and it is cut into several delegates."""
    payloads = payloads_of(streamed(made("llama block"), tmp_path))
    squares = [constants_of(payload).count(np.float32(2).tobytes()) for payload in payloads]
    assert squares == [1, 0, 1]
    assert stream_pack.verify(tmp_path / "program.pte").ok
    NodeVisitor._tensor_to_id.clear()
    stock = payloads_of(bytes(manager_of(made("llama block")).buffer))
    squares = [constants_of(payload).count(np.float32(2).tobytes()) for payload in stock]
    assert squares == [1, 0, 0]


def test_what_the_device_would_abort_on_is_refused_by_name(tmp_path: Path) -> None:
    class Table(torch.nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.table

    for table, why in (
        (torch.ones(3, 4, dtype=torch.bfloat16), "constant of torch.bfloat16"),
        (torch.ones(3, 0), "has no elements"),
    ):
        program = exported(Table(table), (torch.ones(2, 3, dtype=table.dtype),))
        with pytest.raises(UnsupportedTensorError, match=f"table.*{why}"):
            streamed(program, tmp_path)


class Offset(torch.nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


@pytest.mark.parametrize("number", NUMBERS)
def test_a_constant_is_streamed_if_the_runtime_takes_its_type(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datatype = MPSDataType(number) if number in ENUM else number
    dtype_of = NodeVisitor.get_serialized_dtype

    def labelled(self: Any, node: Any) -> Any:
        return datatype if is_parameter(self.exported_program, node) else dtype_of(self, node)

    monkeypatch.setattr(NodeVisitor, "get_serialized_dtype", labelled)
    model = Offset()
    program = exported(model, (torch.ones(2, 3),))
    name = ENUM.get(number)
    if name not in TAKEN:
        with pytest.raises(UnsupportedTensorError, match="table.*the MPS runtime aborts on it"):
            streamed(program, tmp_path)
        return
    (payload,) = payloads_of(streamed(program, tmp_path, alignment="stock"))
    # ExecuTorch itself stores int4, which it packs on a device only.
    stored = model.table if name == "int4" else model.table.to(getattr(torch, name))
    assert constants_of(payload) == [stored.numpy().tobytes()]
    graph = graph_of(payload)
    (value,) = (graph["mps_values"][number] for number in graph["constant_ids"])
    assert value["datatype"] == f"mps_data_type_{name}"


def _write_program(manager: Any, path: Path) -> None:
    assert write_program(manager, path) == path.stat().st_size


def _write_to_file(manager: Any, path: Path, buffering: int = -1) -> None:
    with open(path, "wb", buffering=buffering) as file:
        manager.write_to_file(file)


def _write_to_memory(manager: Any, path: Path) -> None:
    file = io.BytesIO()
    manager.write_to_file(file)
    path.write_bytes(file.getvalue())


WAYS_OUT: dict[str, Callable[[Any, Path], object]] = {
    "write_program": _write_program,
    "save": lambda manager, path: manager.save(str(path)),
    "write_to_file": _write_to_file,
    "write_to_file, unbuffered": lambda manager, path: _write_to_file(manager, path, 0),
    "write_to_file, in memory": _write_to_memory,
    "buffer": lambda manager, path: path.write_bytes(manager.buffer),
    "a copy": lambda manager, path: copy.deepcopy(manager).save(str(path)),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, bytes]]:
    """A manager whose block was left, and what each way out gave in it."""
    folder = tmp_path_factory.mktemp("left")
    inside = {}
    with streaming_constants(folder, alignment="stock"):
        manager = manager_of(made("scalars"))
        for number, way in enumerate(WAYS_OUT):
            path = folder / f"{number}.pte"
            WAYS_OUT[way](manager, path)
            inside[way] = path.read_bytes()
    manager._buffer = None  # what ExecuTorch's buffer has kept
    return manager, inside


@pytest.mark.parametrize("way", WAYS_OUT)
def test_every_way_out_gives_the_right_bytes_in_the_block_and_after_it(
    way: str, left: tuple[Any, dict[str, bytes]], tmp_path: Path
) -> None:
    manager, inside = left
    assert inside[way] == stock_of("scalars")
    WAYS_OUT[way](manager, tmp_path / "program.pte")
    assert (tmp_path / "program.pte").read_bytes() == stock_of("scalars")


def test_writing_a_program_replaces_a_file_and_keeps_nothing_else(
    left: tuple[Any, dict[str, bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "program.pte"
    path.write_bytes(b"old")
    path.chmod(0o640)
    assert write_program(left[0], path) == len(stock_of("scalars"))
    assert path.read_bytes() == stock_of("scalars")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_to_executorch_after_the_block_gives_the_right_bytes(tmp_path: Path) -> None:
    with streaming_constants(tmp_path, alignment="stock"):
        edge = lowered(made("scalars"))
    assert bytes(edge.to_executorch().buffer) == stock_of("scalars")
    assert bytes(copy.deepcopy(edge).to_executorch().buffer) == stock_of("scalars")


@pytest.mark.parametrize("when", ["in the block", "after it"])
def test_a_lowered_module_gives_its_own_bytes(when: str, tmp_path: Path) -> None:
    def module() -> Any:
        model, inputs = SOUND["scalars"]()
        edge = to_edge(exported(model, inputs))
        specs = [CompileSpec("use_fp16", bytes([0]))]
        return to_backend("MPSBackend", edge.exported_program(), specs)

    torch.manual_seed(0)
    NodeVisitor._tensor_to_id.clear()
    stock = module()
    found = []
    torch.manual_seed(0)
    with streaming_constants(tmp_path, alignment="stock"):
        ours = module()
        if when == "in the block":
            found = [ours.processed_bytes, ours.buffer(), copy.deepcopy(ours).processed_bytes]
    if when == "after it":
        found = [ours.processed_bytes, ours.buffer(), copy.deepcopy(ours).processed_bytes]
    assert found == [stock.processed_bytes, stock.buffer(), stock.processed_bytes]
    assert [type(data) for data in found] == [bytes] * 3


def test_whoever_calls_preprocess_himself_has_bytes(tmp_path: Path) -> None:
    edge = to_edge(made("scalars")).exported_program()
    specs = [CompileSpec("use_fp16", bytes([0]))]
    NodeVisitor._tensor_to_id.clear()
    stock = MPSBackend.preprocess(edge, specs).processed_bytes
    with streaming_constants(tmp_path, alignment="stock"):
        ours = MPSBackend.preprocess(edge, specs).processed_bytes
    assert type(ours) is bytes
    assert ours == stock


@pytest.mark.parametrize("extract", [False, True])
def test_serializing_the_emitted_program_again_is_right_in_the_block_and_refused_after_it(
    extract: bool, tmp_path: Path
) -> None:
    def serialized(manager: Any) -> bytes:
        file = PTEFile(program=manager.executorch_program)
        return bytes(serialize_pte_binary(file, extract_delegate_segments=extract))

    program = made("scalars")
    with streaming_constants(tmp_path, alignment="stock"):
        manager = manager_of(program)
        inside = serialized(manager)
    NodeVisitor._tensor_to_id.clear()
    assert inside == serialized(manager_of(program))
    with pytest.raises(StateError, match="write_program"):
        serialized(manager)


def test_two_threads_stream_and_a_third_does_not(tmp_path: Path) -> None:
    """torch.export is not made for threads: they are in their blocks together, and export in turn."""
    results: dict[int, bytes] = {}
    failures: list[BaseException] = []
    expected = stock_of("scalars")
    NodeVisitor._tensor_to_id.clear()
    turn, together = threading.Lock(), threading.Barrier(2)

    def work(number: int) -> None:
        try:
            if number == 2:
                with turn:
                    manager = manager_of(made("scalars"))
                    assert type(manager._pte_data).__name__ == "Cord"
            else:
                with streaming_constants(tmp_path, alignment="stock"):
                    together.wait(60)
                    with turn:
                        manager = manager_of(made("scalars"))
            results[number] = bytes(manager.buffer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [results[number] for number in range(3)] == [expected] * 3


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("name", SOUND)
def test_the_backend_is_given_the_weights_themselves_and_writes_to_none(
    name: str, fp16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = MPSBackend.preprocess
    given: set[int] = set()

    def state(tensor: torch.Tensor) -> tuple[object, ...]:
        """What a write would change: where it is, its version, how long its storage is, its elements."""
        place = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        return place, tensor._version, tensor.untyped_storage().nbytes(), tensor.detach().clone().numpy().tobytes()

    def preprocess(edge_program: Any, specs: Any) -> Any:
        weights = {**edge_program.state_dict, **edge_program.constants}
        before = {name: state(tensor) for name, tensor in weights.items()}
        given.update(tensor.data_ptr() for tensor in weights.values() if tensor.numel())
        result = stock(edge_program, specs)
        assert {name: state(tensor) for name, tensor in weights.items()} == before
        return result

    monkeypatch.setattr(MPSBackend, "preprocess", staticmethod(preprocess))
    program = made(name)
    streamed(program, tmp_path, fp16=fp16)
    own = {tensor.data_ptr() for tensor in (*program.state_dict.values(), *program.constants.values())}
    assert given
    assert own & given


def test_channels_last_weights_are_those_of_the_model(tmp_path: Path) -> None:
    model = Convolution().eval()
    model.conv.weight = torch.nn.Parameter(model.conv.weight.detach().to(memory_format=torch.channels_last))
    program = torch.export.export(model, (torch.ones(1, 3, 8, 8),))
    (tmp_path / "program.pte").write_bytes(streamed(program, tmp_path))
    found = False
    inspection = stream_pack.inspect(tmp_path / "program.pte")
    for payload in inspection.payloads:
        if payload.kind == "pack":
            with stream_pack.open(tmp_path / "program.pte", offset=payload.file_offset) as pack:
                for name in pack:
                    if name == "conv.weight":
                        assert torch.equal(pack[name].torch(), model.conv.weight)
                        found = True
    assert found


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    program = made("scalars")
    before = NodeVisitor.get_serialized_data
    with pytest.raises(ZeroDivisionError), streaming_constants(tmp_path):
        lowered(program)
        raise ZeroDivisionError
    assert NodeVisitor.get_serialized_data is before
    assert bytes(manager_of(program).buffer)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_backend_in_the_block_is_early_enough(tmp_path: Path) -> None:
    script = f"""
import warnings
warnings.simplefilter("ignore")
import torch
from executorch.exir import to_edge_transform_and_lower
from stream_pack.executorch import streaming_constants
program = torch.export.export(torch.nn.Linear(64, 64).eval(), (torch.randn(1, 64),))
with streaming_constants({str(tmp_path)!r}):
    from executorch.backends.apple.mps.partition.mps_partitioner import MPSPartitioner
    edge = to_edge_transform_and_lower(program, partitioner=[MPSPartitioner([])])
    held = edge.to_executorch()._pte_data._buffers
print(*[type(part).__name__ for part in held])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Held" in done.stdout.splitlines()[-1].split()


@needs_proc
def test_an_export_takes_little_memory_beside_the_model(tmp_path: Path) -> None:
    """96 MiB of weights in six layers; ExecuTorch alone adds three times, or twice, as much."""
    script = f"""
import logging, warnings
warnings.simplefilter("ignore")
import torch
from executorch.backends.apple.mps.partition.mps_partitioner import MPSPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import CompileSpec
from stream_pack.executorch import streaming_constants, write_program
from tests.support.memory import anonymous_nbytes
logging.disable()
logging.root.setLevel(logging.WARNING)

def export(layers, width):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    program = torch.export.export(model.eval(), (torch.randn(1, width),))
    before = anonymous_nbytes()
    for fp16 in (False, True):
        partitioner = MPSPartitioner([CompileSpec("use_fp16", bytes([fp16]))])
        with streaming_constants({str(tmp_path)!r}):
            edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
            write_program(edge.to_executorch(), {str(tmp_path / "program.pte")!r})
    return before

export(1, 8)
print(export(6, 2048))
"""
    result = measure([sys.executable, "-c", script])
    before = int(result.stdout.splitlines()[-1])
    assert (tmp_path / "program.pte").stat().st_size >= 48 * MIB
    assert result.peak_anonymous_nbytes - before < 48 * MIB
