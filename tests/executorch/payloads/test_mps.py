"""Payloads of the MPS delegate, against ExecuTorch's own schema, its sample files and exports made here."""

from __future__ import annotations

import contextlib
import copy
import importlib.resources
import io
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import executorch.backends.apple.mps.serialization as mps_schema
import numpy as np
import pytest
import torch
from executorch.backends.apple.mps import mps_preprocess
from executorch.backends.apple.mps.operators.node_visitor import NodeVisitor
from executorch.backends.apple.mps.partition.mps_partitioner import MPSPartitioner
from executorch.backends.apple.mps.serialization.mps_graph_schema import (
    Buffer,
    DataSegment,
    MPSAdd,
    MPSDataType,
    MPSGraph,
    MPSNode,
    MPSTensor,
    OpType,
)
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import CompileSpec

import stream_pack
from stream_pack.cli import main
from stream_pack.errors import SourceError, UnsupportedTensorError
from stream_pack.executorch import build_mps_payload
from stream_pack.format.graph_mps_nodes import NODES
from stream_pack.sources.open import open_source
from tests.executorch.flatc import decoded, graph_of
from tests.support.mps_types import ENUM, NUMBERS, TAKEN
from tests.support.sparse_source import SparseSource

VECTORS = Path(__file__).parents[2] / "vectors" / "executorch" / "mps"
ABORTS = "dtypes_all_fp32"  # has a bfloat16 and a uint8
CASES = [path.name.removesuffix(".graph.json") for path in sorted(VECTORS.glob("*.graph.json"))]
SOUND = [case for case in CASES if case != ABORTS]


def stock_graph(case: str) -> Any:
    return graph_of((VECTORS / f"{case}.graph.json").read_text(), MPSGraph)


def stock_json(case: str) -> dict[str, Any]:
    text = (VECTORS / f"{case}.graph.json").read_text()
    found: dict[str, Any] = json.loads(text, parse_float=lambda digits: float(np.float32(digits)))
    return found


def tensors_of(case: str) -> dict[int, Any]:
    with np.load(VECTORS / f"{case}.expected.npz") as file:
        return {int(name.removeprefix("id")): file[name] for name in file}


def header(payload: bytes) -> tuple[int, int]:
    """Where the constants are, as ExecuTorch's header reads."""
    zero, magic, offset, nbytes = struct.unpack_from("<4s4sQQ", payload)
    assert (zero, magic) == (bytes(4), b"MP00")
    return offset, nbytes


def flatbuffer(payload: bytes) -> dict[str, Any]:
    return decoded(payload[24 : header(payload)[0]], mps_schema.__name__)


def without_places(graph: dict[str, Any], *, sizes: bool = True) -> dict[str, Any]:
    graph = copy.deepcopy(graph)
    for value in graph["mps_values"]:
        del value["segment_offset"]
        if not sizes:
            del value["constant_buffer_size"]
    return graph


def constants_in(payload: bytes) -> dict[int, bytes]:
    """Each constant's bytes, at the place that the flatbuffer says, found without our reader."""
    graph, (offset, nbytes) = flatbuffer(payload), header(payload)
    found = {}
    for number in graph["constant_ids"]:
        value = graph["mps_values"][number]
        begin = value["segment_offset"]
        end = begin + value["constant_buffer_size"]
        assert end <= nbytes
        found[number] = payload[offset + begin : offset + end]
    return found


def simple(datatype: int = 2, dims: list[int] | None = None, *, ids: tuple[int, ...] = (1,)) -> Any:
    """A graph of an input, one constant and an output."""
    dims = [2, 3] if dims is None else dims
    values = [MPSTensor(MPSDataType(datatype), len(dims), list(dims), 0, Buffer(b"")) for _ in range(3)]
    return MPSGraph("0", [], values, [0], [2], list(ids), OpType.mps_graph, DataSegment(0, 0))


@pytest.mark.parametrize("case", SOUND)
def test_a_payload_says_what_stock_says_but_for_the_places(case: str, tmp_path: Path) -> None:
    path = tmp_path / "payload"
    build_mps_payload(stock_graph(case), tensors_of(case), path)
    faulty = case.startswith("FAULT")
    ours = without_places(flatbuffer(path.read_bytes()), sizes=not faulty)
    assert ours == without_places(stock_json(case), sizes=not faulty)


@pytest.mark.parametrize("case", SOUND)
def test_each_constant_is_the_modules_tensor_also_where_stock_stores_another(case: str, tmp_path: Path) -> None:
    path = tmp_path / "payload"
    build_mps_payload(stock_graph(case), tensors_of(case), path)
    assert constants_in(path.read_bytes()) == {number: tensor.tobytes() for number, tensor in tensors_of(case).items()}


@pytest.mark.parametrize("case", SOUND)
def test_a_payload_is_a_pack(case: str, tmp_path: Path) -> None:
    path = tmp_path / "payload"
    build_mps_payload(stock_graph(case), tensors_of(case), path)
    with stream_pack.open(path) as pack:
        assert set(pack) == {str(number) for number in tensors_of(case)}
        for number, tensor in tensors_of(case).items():
            assert pack[str(number)].numpy().tobytes() == tensor.tobytes()
            assert pack[str(number)].file_offset % 256 == 0
        assert not pack.verify().damages
    assert main(["metal-plan", str(path), "--max-buffer-length", "1G"]) == 0


def test_what_the_device_aborts_on_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    path.write_bytes(b"before")
    with pytest.raises(UnsupportedTensorError, match="value 23 is bfloat16"):
        build_mps_payload(stock_graph(ABORTS), tensors_of(ABORTS), path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_enum_is_executorchs() -> None:
    names = {member.value: member.name.removeprefix("mps_data_type_") for member in MPSDataType}
    assert names == ENUM


@pytest.mark.parametrize("datatype", [n for n in NUMBERS if ENUM.get(n) == "float64" or ENUM.get(n) not in TAKEN])
def test_of_each_type_that_the_device_does_not_know_no_payload_is_made(datatype: int) -> None:
    like = {3: torch.float64, 4: torch.bfloat16, 11: torch.uint8, 12: torch.uint16, 13: torch.uint32}
    like |= {14: torch.uint64, 16: torch.complex32, 17: torch.complex64}
    tensor = torch.zeros(2, 3, dtype=like.get(datatype, torch.uint8))
    graph = simple()
    graph.mps_values[1].datatype = datatype
    with pytest.raises(UnsupportedTensorError, match="value 1 is .*does not read as such"):
        build_mps_payload(graph, {1: tensor}, io.BytesIO())


# int4 has a test of its own, and float64 is refused.
@pytest.mark.parametrize("datatype", [n for n in ENUM if ENUM[n] in TAKEN - {"int4", "float64"}], ids=ENUM.get)
def test_a_constant_of_each_type_that_the_device_knows_is_taken(datatype: int) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, ENUM[datatype]))
    file = io.BytesIO()
    build_mps_payload(simple(datatype), {1: tensor}, file)
    assert constants_in(file.getvalue()) == {1: tensor.numpy().tobytes()}


@pytest.mark.parametrize(
    ("datatype", "given", "wanted"),
    [(1, torch.float32, torch.float16), (1, torch.float64, torch.float16), (2, torch.float64, torch.float32)],
)
def test_floats_become_what_the_graph_says_as_torch_rounds_them(
    datatype: int, given: torch.dtype, wanted: torch.dtype
) -> None:
    values = torch.randn(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor = (values * 1e4).to(given)
    file = io.BytesIO()
    build_mps_payload(simple(datatype, [6, 7]), {1: tensor.T.contiguous().T}, file)
    # ExecuTorch itself calls half(), of a float64 too, which torch rounds by way of float32.
    expected = tensor.float().to(wanted)
    assert constants_in(file.getvalue()) == {1: expected.numpy().tobytes()}


def test_packed_four_bit_constants_are_taken_as_bytes() -> None:
    packed = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    file = io.BytesIO()
    build_mps_payload(simple(5, [3, 8]), {1: packed}, file)
    assert constants_in(file.getvalue()) == {1: bytes(range(12))}


@pytest.mark.parametrize(
    ("graph", "constants", "says"),
    [
        (simple(), {}, "tensors are missing for the graph's constants: '1'"),
        (simple(), {1: torch.zeros(2, 3), 2: torch.zeros(1)}, "no constant called '2'"),
        (simple(), {"1": torch.zeros(2, 3), 1: torch.zeros(2, 3)}, "two constants are called '1'"),
        (simple(), {True: torch.zeros(2, 3)}, "the key True is a bool"),
        (simple(ids=(1, 1)), {1: torch.zeros(2, 3)}, "name value 1 more than once"),
        (simple(ids=(3,)), {3: torch.zeros(2, 3)}, "name value 3, but it has 3 values"),
        (simple(ids=(-1,)), {-1: torch.zeros(2, 3)}, "name value -1"),
        (simple(), {1: torch.zeros(2, 4)}, r"value 1 has shape \[2, 4\], 8 elements"),
        (simple(), {1: torch.zeros(2, 3, dtype=torch.int32)}, "is int32, the graph says float32"),
        (simple(1), {1: torch.zeros(2, 3, dtype=torch.bfloat16)}, "is bfloat16, the graph says"),
        (simple(2), {1: torch.zeros(2, 3, dtype=torch.float16)}, "is float16, the graph says"),
        (simple(9), {1: torch.zeros(2, 3)}, "is float32, the graph says int64"),
        (simple(2, [0, 3]), {1: torch.zeros(0, 3)}, r"has shape \[0, 3\] and no bytes"),
        (simple(2, [-2, -3]), {1: torch.zeros(2, 3)}, "negative dim"),
        (simple(2, [1] * 65), {1: torch.zeros(1)}, "65 dims in the graph"),
        (simple(5, [2, 3]), {1: torch.zeros(3, dtype=torch.uint8)}, "the last dim must be even"),
        (simple(), {1: torch.zeros(2, 3).to_sparse()}, "sparse"),
    ],
)
def test_what_does_not_fit_the_graph_is_refused(graph: Any, constants: dict[Any, Any], says: str) -> None:
    file = io.BytesIO()
    with pytest.raises(SourceError, match=says):
        build_mps_payload(graph, constants, file)
    assert not file.getvalue()


def test_a_node_that_names_a_value_which_the_graph_does_not_have_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "payload"
    target.write_bytes(b"of before")
    graph = simple()
    for ids, number in (((0, 1, 2), None), ((0, 1, 3), 3), ((7, 1, 2), 7)):
        graph.mps_nodes = [MPSNode(mpsnode_union=MPSAdd(*ids))]
        if number is None:
            build_mps_payload(graph, {1: np.zeros((2, 3), np.float32)}, io.BytesIO())
            continue
        with pytest.raises(SourceError, match=rf"node 0 \(MPSAdd\) names value {number}, and the graph has 3"):
            build_mps_payload(graph, {1: np.zeros((2, 3), np.float32)}, target)
    assert target.read_bytes() == b"of before"
    assert [path.name for path in tmp_path.iterdir()] == ["payload"]


def test_the_ids_of_nodes_are_where_executorchs_schema_has_them() -> None:
    schema = importlib.resources.files(mps_schema).joinpath("schema.fbs").read_text()
    schema = re.sub(r"//.*", "", schema)
    tables = {
        name: re.findall(r"(\w+)\s*:\s*([\w\[\]]+)", body)
        for name, body in re.findall(r"table (\w+) {(.*?)}", schema, re.DOTALL)
    }
    union = re.search(r"union MPSNodeUnion {(.*?)}", schema, re.DOTALL)
    assert union is not None
    members = [member.split(":") for member in union[1].split(",") if member.strip()]
    wanted = []
    for member in members:
        fields = tables[member[-1].strip()]
        kinds = {"int": "", "[int]": "*"}
        ids = [
            f"{'=' * name.startswith('output')}{kinds[kind]}{slot}"
            for slot, (name, kind) in enumerate(fields)
            if re.search("_ids?$", name)
        ]
        unused = {"MPSReLU": "1", "MPSFull": "0"}  # ExecuTorch's own graph has no such field
        ids = [slot for slot in ids if slot != unused.get(member[0].strip())]
        wanted.append((member[0].strip().removeprefix("MPS"), *ids))
    assert tuple(wanted) == NODES


def test_a_graph_whose_num_dims_lies_is_refused() -> None:
    graph = simple()
    graph.mps_values[1].num_dims = 3
    with pytest.raises(SourceError, match="num_dims 3, but 2 dims"):
        build_mps_payload(graph, {1: torch.zeros(2, 3)}, io.BytesIO())


def test_the_callers_graph_stays_as_it_is() -> None:
    graph = stock_graph("llama_block_fp32")
    graph.mps_values[graph.constant_ids[0]].constant_buffer = Buffer(b"bytes of before")
    before = copy.deepcopy(graph)
    file = io.BytesIO()
    build_mps_payload(graph, tensors_of("llama_block_fp32"), file)
    assert graph == before
    assert b"bytes of before" not in file.getvalue()


def test_constants_may_have_names(tmp_path: Path) -> None:
    tensors = tensors_of("conv_bn_fp32")
    names = {number: f"layer.{number}" for number in tensors}
    path = tmp_path / "payload"
    build_mps_payload(stock_graph("conv_bn_fp32"), tensors, path, names=names, metadata={"a": "b"})
    with stream_pack.open(path) as pack:
        assert set(pack) == set(names.values())
        assert pack.metadata == {"a": "b"}
        assert not pack.verify().damages
    twice = dict.fromkeys(tensors, "same")
    with pytest.raises(SourceError, match="would have one name"):
        build_mps_payload(stock_graph("conv_bn_fp32"), tensors, path, names=twice)
    with pytest.raises(SourceError, match="names= has entries for '1000': the graph has no such"):
        build_mps_payload(stock_graph("conv_bn_fp32"), tensors, path, names={1000: "w"})


def test_constants_may_come_from_a_source_in_any_order(tmp_path: Path) -> None:
    tensors = tensors_of("llama_block_fp32")
    constants = {str(number): tensors[number] for number in sorted(tensors, reverse=True)}
    stream_pack.save_file(constants, tmp_path / "constants.pack")
    direct, through = tmp_path / "direct", tmp_path / "through"
    build_mps_payload(stock_graph("llama_block_fp32"), tensors, direct)
    with open_source(tmp_path / "constants.pack") as source:
        build_mps_payload(stock_graph("llama_block_fp32"), source, through)
    assert direct.read_bytes() == through.read_bytes()


def test_constants_may_stand_beyond_4_gib(tmp_path: Path) -> None:
    graph = simple(8, [5 * 2**28])  # 5 GiB of int32
    graph.mps_values.append(MPSTensor(MPSDataType(8), 1, [3], 0, Buffer(b"")))
    graph.constant_ids = [1, 3]
    path = tmp_path / "payload"
    last = struct.pack("<3i", 7, 8, 9)
    try:
        source = SparseSource({"1": ("int32", (5 * 2**28,)), "3": ("int32", (3,))}, endings={"3": last})
        build_mps_payload(graph, source, path)
        with open(path, "rb") as file:
            head = file.read(16384)
            values = flatbuffer(head)["mps_values"]
            assert values[3]["segment_offset"] >= 5 << 30
            file.seek(header(head)[0] + values[3]["segment_offset"])
            assert file.read(12) == last
    finally:
        path.unlink()


def test_a_plain_pack_decodes_with_executorchs_schema(tmp_path: Path) -> None:
    path = tmp_path / "plain.pack"
    tensors = {
        "w": torch.arange(6.0).reshape(2, 3),
        "step": torch.tensor(7),
        "none": torch.empty(0, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "other": torch.ones(2, dtype=torch.float8_e4m3fn),
    }
    stream_pack.save_file(tensors, path)
    graph = flatbuffer(path.read_bytes())
    assert graph["constant_ids"] == [0, 1, 2, 3, 4]
    assert graph["mps_nodes"] == graph["input_ids"] == graph["output_ids"] == []
    types = [value["datatype"].removeprefix("mps_data_type_") for value in graph["mps_values"]]
    assert types == ["float32", "int64", "float32", "bfloat16", "invalid"]
    assert [value["dims"] for value in graph["mps_values"]] == [[2, 3], [], [0, 4], [3], []]
    stored = constants_in(path.read_bytes())
    assert stored[0] == tensors["w"].numpy().tobytes()
    assert stored[1] == (7).to_bytes(8, "little")
    assert stored[2] == b""
    assert stored[4] == tensors["other"].view(torch.uint8).numpy().tobytes()


class Views(torch.nn.Module):
    """Weights that are rows of one storage, one of them not from its start; and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("rows", whole[4:6])
        self.register_buffer("first", whole[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, first = self.get_buffer("rows"), self.get_buffer("first")
        result: torch.Tensor = self.linear(x) * 0.5 + rows - first
        return result


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], dict[int, torch.Tensor]]]:
    """The graphs that an export makes, before their constants are cut out, and the tensors behind them."""
    graphs: list[Any] = []
    tensors: dict[int, torch.Tensor] = {}
    serialize, extract = NodeVisitor.get_serialized_data, mps_preprocess._extract_constant_segment

    def noting(self: Any, tensor: Any, graph: Any, datatype: Any, id: int) -> Any:
        tensors[id] = tensor
        return serialize(self, tensor, graph, datatype, id)

    def keeping(graph: Any) -> Any:
        graphs.append(copy.deepcopy(graph))
        return extract(graph)

    with monkeypatch.context() as patches:
        patches.setattr(NodeVisitor, "get_serialized_data", noting)
        patches.setattr(NodeVisitor, "_tensor_to_id", {})
        patches.setattr(mps_preprocess, "_extract_constant_segment", keeping)
        yield graphs, tensors


@pytest.mark.parametrize("fp16", [False, True])
def test_the_graph_of_a_new_export_gives_a_payload_with_the_modules_own_tensors(
    fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Views().eval()
    program = torch.export.export(module, (torch.randn(2, 8),))
    with watched(monkeypatch) as (graphs, tensors):
        manager = to_edge_transform_and_lower(
            program, partitioner=[MPSPartitioner([CompileSpec("use_fp16", bytes([fp16]))])]
        )
    (graph,) = graphs
    lowered = [
        getattr(manager.exported_program().graph_module, node.name)
        for node in manager.exported_program().graph.nodes
        if node.op == "get_attr"
    ]
    (stock,) = [lowered_module.processed_bytes for lowered_module in lowered]
    file = io.BytesIO()
    build_mps_payload(graph, tensors, file)
    ours = file.getvalue()
    # Stock stores the whole storage of rows and first.
    assert without_places(flatbuffer(ours), sizes=False) == without_places(flatbuffer(stock), sizes=False)
    held = list(constants_in(ours).values())
    for name, tensor in module.state_dict().items():
        wanted = tensor.half() if fp16 else tensor
        assert wanted.numpy().tobytes() in held, name
