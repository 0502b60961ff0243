"""Payloads of the XNNPACK delegate with constants in line, run by ExecuTorch's Linux runtime beside stock ones."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import ConstantDataOffset, XNNGraph
from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader

import stream_pack
from stream_pack.errors import SourceError, UnsupportedTensorError
from stream_pack.executorch import build_xnnpack_payload
from stream_pack.sources.memory.source import LiveSource
from tests.executorch.models import EXPORTS, exported
from tests.executorch.programs import (
    named_data,
    run,
    run_file,
    with_payload_beyond,
    with_payloads,
    xnn_graph,
    xnn_json,
    xnnpack_payloads,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "executorch" / "xnnpack"
PRELU = "conv_linear_fp32"
CASES = [path.name.removesuffix(".io.npz") for path in sorted(VECTORS.glob("*.io.npz"))]
SOUND = [case for case in CASES if case != PRELU]
BY_KEY = 2**64 - 1


def program_of(case: str) -> bytes:
    return (VECTORS / f"{case}.pte").read_bytes()


def inputs_of(case: str) -> list[torch.Tensor]:
    with np.load(VECTORS / f"{case}.io.npz") as file:
        return [torch.from_numpy(file[name]) for name in sorted(file) if name.startswith("in")]


def by_key(payload: bytes, named: Mapping[str, bytes]) -> dict[str, Any]:
    """The bytes of each constant of a stock payload, under its key."""
    keys = {entry.named_key for entry in xnn_graph(payload).constant_data[1:]}
    return {key: np.frombuffer(named[key], np.uint8) for key in keys}


def rebuilt(payload: bytes, named: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    build_xnnpack_payload(xnn_graph(payload), by_key(payload, named), file)
    return file.getvalue()


def check_runs_alike(stock: bytes, inputs: Any, path: Path) -> None:
    """Not against stored outputs: those depend on the machine's instruction set."""
    ours = with_payloads(stock, rebuilt)
    assert not named_data(ours)
    expected = [output.tobytes() for output in run(stock, inputs)]
    assert any(any(output) for output in expected)
    assert [output.tobytes() for output in run(ours, inputs)] == expected
    path.write_bytes(ours)
    assert [output.tobytes() for output in run_file(path, inputs)] == expected


@pytest.mark.parametrize("case", SOUND)
def test_a_rebuilt_program_of_1_4_gives_what_the_stock_one_gives(case: str, tmp_path: Path) -> None:
    check_runs_alike(program_of(case), inputs_of(case), tmp_path / "program.pte")


@pytest.mark.parametrize("name", EXPORTS)
def test_a_rebuilt_program_of_a_new_export_gives_what_the_stock_one_gives(name: str, tmp_path: Path) -> None:
    stock, inputs = exported(name)
    assert any(entry["named_key"] for p in xnnpack_payloads(stock) for entry in constants_of(p))
    check_runs_alike(stock, inputs, tmp_path / "program.pte")


def constants_of(payload: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = xnn_json(payload)["constant_data"]
    return entries[1:]


@pytest.mark.parametrize("case", SOUND)
def test_a_payload_says_what_stock_says_but_for_where_constants_are(case: str) -> None:
    named = named_data(program_of(case))
    for stock in xnnpack_payloads(program_of(case)):
        ours = rebuilt(stock, named)
        there, here = xnn_json(stock), xnn_json(ours)
        header = XNNHeader.from_bytes(ours[: XNNHeader.EXPECTED_LENGTH])
        assert header.is_valid()
        region = ours[header.constant_data_offset :][: header.constant_data_size]
        before, after = there.pop("constant_data"), here.pop("constant_data")
        assert here == there
        assert after[0] == before[0] == {"offset": 0, "size": 0, "named_key": ""}
        for old, new in zip(before[1:], after[1:], strict=True):
            assert old["offset"] == BY_KEY
            # A key that is there, even an empty one, is looked up by the runtime.
            assert set(new) == {"offset", "size"}
            assert new["offset"] % 256 == 0
            assert region[new["offset"] :][: new["size"]] == named[old["named_key"]]


def test_equal_constants_are_stored_once_and_run(tmp_path: Path) -> None:
    stock, _ = exported("equal weights")
    (payload,) = xnnpack_payloads(with_payloads(stock, rebuilt))
    places = [(entry["offset"], entry["size"]) for entry in constants_of(payload)]
    assert places[:2] == places[2:]


def test_a_payload_is_a_pack_and_knows_its_tensors(tmp_path: Path) -> None:
    (stock,) = xnnpack_payloads(program_of("conv_dw_linear_fp32"))
    graph, named = xnn_graph(stock), named_data(program_of("conv_dw_linear_fp32"))
    constants = {
        number: torch.frombuffer(bytearray(named[entry.named_key]), dtype=torch.float32)
        for number, entry in enumerate(graph.constant_data)
        if number
    }
    path = tmp_path / "payload"
    names = dict.fromkeys([2], "bias")
    report = build_xnnpack_payload(graph, constants, path, names=names, metadata={"a": "b"})
    assert report.tensors == len(constants)
    with stream_pack.open(path) as pack:
        assert set(pack) == {"bias", "1", *(str(n) for n in range(3, len(constants) + 1))}
        assert torch.equal(pack["bias"].torch(), constants[2])
        assert pack.metadata == {"a": "b"}
        assert not pack.verify().damages


def test_payloads_inside_a_program_open_by_their_offsets(tmp_path: Path) -> None:
    stock, _ = exported("two delegates")
    path = tmp_path / "program.pte"
    path.write_bytes(with_payloads(stock, rebuilt))
    program = path.read_bytes()
    for payload in xnnpack_payloads(program):
        offset = program.index(payload)
        assert offset % 16384 == 0
        with stream_pack.open(path, offset=offset, nbytes=len(payload)) as pack:
            assert not pack.verify().damages
            assert [tensor.file_offset % 256 for tensor in pack.values()] == [0, 0]


class Sparse(LiveSource):
    """No disk space is set aside for the gaps."""

    def __init__(self, tensors: Mapping[str, object]) -> None:
        super().__init__(tensors)
        self.traits = dataclasses.replace(self.traits, sparse=True)


def test_constants_may_stand_beyond_4_gib(tmp_path: Path) -> None:
    stock, inputs = program_of("linear_fp32"), inputs_of("linear_fp32")
    (payload,) = xnnpack_payloads(stock)
    sparse, program = tmp_path / "payload", tmp_path / "program.pte"
    gib = stream_pack.Alignment(small=1 << 30, large=1 << 30)
    try:
        constants = Sparse(by_key(payload, named_data(stock)))
        build_xnnpack_payload(xnn_graph(payload), constants, sparse, alignment=gib)
        with open(sparse, "rb") as file:
            last = constants_of(file.read(16384))[-1]
        assert last["offset"] == 4 << 30
        with_payload_beyond(stock, sparse, program)
        assert program.stat().st_size > 5 << 30
        assert [output.tobytes() for output in run_file(program, inputs)] == [
            output.tobytes() for output in run(stock, inputs)
        ]
    finally:
        sparse.unlink(missing_ok=True)
        program.unlink(missing_ok=True)


def test_a_graph_with_prelu_is_refused_and_its_stock_program_runs(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    stock = program_of(PRELU)
    (payload,) = xnnpack_payloads(stock)
    with pytest.raises(SourceError, match="node 2 of the graph is a PReLU"):
        build_xnnpack_payload(xnn_graph(payload), by_key(payload, named_data(stock)), path)
    assert not path.exists()
    assert run(stock, inputs_of(PRELU))


def simple(*sizes: int, keys: tuple[str, ...] = ()) -> Any:
    entries = [ConstantDataOffset(0, 0)]
    for number, size in enumerate(sizes):
        entries.append(ConstantDataOffset(BY_KEY, size, keys[number] if keys else f"k{number}"))
    return XNNGraph("0", [], [], 0, [], [], entries)


FOUR = np.zeros(1, np.float32)


@pytest.mark.parametrize(
    ("graph", "constants", "says"),
    [
        (simple(4), {}, "tensors are missing for the graph's constants: '1'"),
        (simple(4), {"k0": FOUR, "k1": FOUR}, "the graph has no constant called 'k1'"),
        (simple(4), {0: FOUR, 1: FOUR}, "the graph has no constant called '0'"),
        (simple(4), {1: FOUR, "k0": FOUR}, "constant 1 was given twice, as '1' and as 'k0'"),
        (simple(8), {1: FOUR}, "constant 1 has 4 bytes, the graph says 8"),
        (simple(0), {1: FOUR[:0]}, "and no bytes"),
        (simple(4, 4), {1: FOUR, 2: object()}, "neither a torch tensor nor a NumPy array"),
        (XNNGraph("0", [], [], 0, [], [], []), {}, "expected the reserved entry"),
        (XNNGraph("0", [], [], 0, [], [], [ConstantDataOffset(0, 4, "k")]), {}, "expected the reserved entry"),
    ],
)
def test_what_does_not_fit_the_graph_is_refused(graph: Any, constants: dict[Any, Any], says: str) -> None:
    file = io.BytesIO()
    with pytest.raises(SourceError, match=says):
        build_xnnpack_payload(graph, constants, file)
    assert not file.getvalue()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({1: "same", 2: "same"}, "constant 1 ('same') and constant 2 ('same') would have one name: give each its own"),
        ({1: "2"}, "constant 1 ('2') and constant 2 would have one name: give each its own"),
        ({3: "w"}, "names= has entries for '3': the graph has no such constant"),
        ({0: "w"}, "names= has entries for '0': the graph has no such constant"),
        ({1: "\ud800"}, "would have a name that is not valid UTF-8"),
    ],
)
def test_names_that_do_not_fit_the_graph_are_refused(names: dict[int, str], says: str) -> None:
    file = io.BytesIO()
    with pytest.raises(SourceError, match=re.escape(says)):
        build_xnnpack_payload(simple(4, 4), {1: FOUR, 2: FOUR}, file, names=names)
    assert not file.getvalue()


def test_what_is_wrong_with_a_tensor_names_it_as_the_pack_would() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"constant 1 \('w'\) has 4 bytes") as caught:
        build_xnnpack_payload(simple(8), {1: FOUR}, io.BytesIO(), names={1: "w"})
    assert caught.value.tensor == "w"


def test_the_callers_graph_stays_as_it_is() -> None:
    graph = simple(4, 4, keys=("same", "same"))
    before = copy.deepcopy(graph)
    file = io.BytesIO()
    build_xnnpack_payload(graph, {"same": FOUR}, file)
    assert graph == before
    assert len(constants_of(file.getvalue())) == 2
