"""Nodes of an MPSGraph that name values which do not exist: said wherever the graph is read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import stream_pack
from stream_pack import FormatError
from stream_pack.cli import main
from stream_pack.format import graph_mps
from tests.support.et_files import Constant, Delegate, Node, mps_payload, program

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch" / "mps"
CONSTANTS = [Constant((1,), 0), Constant((1,), 4), Constant((1,), 8)]
ADD, RELU, CAT, SPLIT, INDEX, CONV, NORM = 7, 2, 68, 74, 61, 76, 84  # members of MPSNodeUnion, counted from 1

RIGHT = [
    Node(ADD, {0: 0, 1: 1, 2: 2}),
    Node(RELU, {0: 0, 2: 2}),
    Node(CAT, {0: [0, 1, 0], 1: 2}),
    Node(SPLIT, {0: 2, 1: [0, 1]}),
    Node(INDEX, {0: 0, 1: [-1, 2], 2: 1}),
    Node(CONV, {0: 0, 1: 1, 2: -1, 3: 2}),
    Node(NORM, {0: 0, 1: 1, 2: 2, 3: -1, 4: -1, 7: 1, 8: 2, 9: 0}),
    Node(ADD, {}),  # 0 everywhere
    Node(200, {0: 77}),  # of a later version, perhaps
]
WRONG = [
    (Node(ADD, {0: 0, 1: 3, 2: 2}), "Add", 3),
    (Node(ADD, {0: 0, 1: 1, 2: 1000}), "Add", 1000),
    (Node(RELU, {0: -2, 2: 2}), "ReLU", -2),
    (Node(CAT, {0: [0, 1, 4], 1: 2}), "Cat", 4),
    (Node(SPLIT, {0: 2, 1: [0, 3]}), "SplitWithSizes", 3),
    (Node(INDEX, {0: 0, 1: [-1, 5], 2: 1}), "IndexTensor", 5),
    (Node(CONV, {0: 0, 1: 1, 2: 9, 3: 2}), "Conv2D", 9),
    (Node(NORM, {0: 0, 1: 1, 2: 2, 3: -1, 4: -1, 7: 1, 8: 2, 9: 7}), "BatchNorm", 7),
]


def check(payload: bytes) -> None:
    (region,) = struct.unpack_from("<Q", payload, 8)
    graph_mps.check_nodes(memoryview(payload)[24:region])


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.mp00")), ids=lambda path: path.stem)
def test_graphs_of_executorchs_own_name_their_own_values(path: Path) -> None:
    check(path.read_bytes())


def test_every_id_that_is_a_value_s_or_none_is_right() -> None:
    check(mps_payload(CONSTANTS, bytes(12), nodes=RIGHT, inputs=[0, 2], outputs=[1]))


@pytest.mark.parametrize(("node", "name", "value"), WRONG, ids=[f"{name}-{value}" for _, name, value in WRONG])
def test_an_id_that_is_no_value_s_is_named_with_its_node(node: Node, name: str, value: int) -> None:
    payload = mps_payload(CONSTANTS, bytes(12), nodes=[*RIGHT, node])
    text = rf"node {len(RIGHT)} \(MPS{name}\) names value {value}, and the graph has 3"
    with pytest.raises(FormatError, match=text):
        check(payload)


@pytest.mark.parametrize(
    ("nodes", "inputs", "wrong"),
    [
        ([Node(RELU, {0: 0, 2: 2}), Node(ADD, {0: 2, 1: 1, 2: 3})], [0], None),
        ([Node(RELU, {0: 2, 2: 3}), Node(RELU, {0: 0, 2: 2})], [0], (0, 2)),  # made later
        ([Node(RELU, {0: 2, 2: 2})], [0], (0, 2)),  # made by itself
        ([Node(RELU, {0: 0, 2: 2}), Node(CAT, {0: [0, 3], 1: 3})], [0], (1, 3)),  # made by none
        ([Node(RELU, {0: 0, 2: 2})], [], (0, 0)),  # no input
        ([Node(RELU, {0: 2, 2: 3}), Node(200, {})], [0], None),  # who knows what a later version's node makes
        ([Node(55, {1: 0}), Node(RELU, {0: 0, 2: 2})], [], None),  # Full has no operand
    ],
)
def test_what_a_node_uses_is_there_by_then(nodes: list[Node], inputs: list[int], wrong: tuple[int, int] | None) -> None:
    payload = mps_payload([*CONSTANTS, Constant((1,), 0)], bytes(12), ids=[1], nodes=nodes, inputs=inputs)
    if wrong is None:
        check(payload)
        return
    node, value = wrong
    text = rf"node {node} \(MPS\w+\) names value {value}, which is no input, no constant and no result of an earlier"
    with pytest.raises(FormatError, match=text):
        check(payload)


def test_the_first_of_several_is_named() -> None:
    nodes = [RIGHT[0], Node(CAT, {0: [0, 9], 1: 8}), Node(ADD, {0: 5, 1: 6, 2: 7})]
    with pytest.raises(FormatError, match=r"node 1 \(MPSCat\) names value 8, and the graph has 3 \(4 more are wrong\)"):
        check(mps_payload(CONSTANTS, bytes(12), nodes=nodes))


@pytest.mark.parametrize(("ends", "what"), [({"inputs": [3]}, "inputs"), ({"outputs": [0, -1]}, "outputs")])
def test_inputs_and_outputs_are_values(ends: dict[str, list[int]], what: str) -> None:
    with pytest.raises(FormatError, match=rf"'s {what} name value (3|-1), but it has 3 values"):
        check(mps_payload(CONSTANTS, bytes(12), **ends))  # type: ignore[arg-type]


def test_verify_inspect_and_convert_say_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    payload = mps_payload(CONSTANTS, bytes(12), nodes=[WRONG[0][0]])
    head = program([Delegate(0)], [(0, len(payload))], base=2048, segments_nbytes=len(payload))
    for data, place in ((payload, ""), (head + payload, "the payload of 'forward/0': ")):
        path = tmp_path / "file"
        path.write_bytes(data)
        text = f"{place}the graph's node 0 (MPSAdd) names value 3, and the graph has 3"
        assert main(["verify", str(path)]) == 1
        assert text in capfd.readouterr().out
        (fault,) = stream_pack.inspect(path).faults
        assert fault.startswith(text)
        report = stream_pack.convert(path, tmp_path / "pack")  # the constants can be had
        assert report.tensors == 3
        assert any(warning.startswith(text) for warning in report.warnings)


def test_verifying_a_pack_checks_its_graph_too(tmp_path: Path) -> None:
    stream_pack.save_file({}, tmp_path / "pack")
    with stream_pack.open(tmp_path / "pack") as pack:
        index = pack._head.index
    payload = mps_payload([], b"", outputs=[0])
    (region,) = struct.unpack_from("<Q", payload, 8)
    with pytest.raises(FormatError, match="outputs name value 0, but it has 0 values"):
        graph_mps.KIND.disagreements(memoryview(payload)[24:region], index)
