"""The FlatBuffers compiler, a foreign reader, agrees on the graph and the index of the vector."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stream_pack.format.align import Alignment
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import encode_head
from stream_pack.format.header_kinds import MPS
from stream_pack.format.layout import Policy, plan
from tests.vectors.minimal_reader import integers, read

ROOT = Path(__file__).parent.parent.parent
VECTORS = ROOT / "tests" / "vectors"
VECTOR = (VECTORS / "v1-mp00.pack").read_bytes()
SCHEMA = ROOT / "stream_pack" / "format" / "schema"

pytestmark = pytest.mark.skipif(
    shutil.which("flatc") is None, reason="the FlatBuffers compiler (flatc) is not installed"
)


def decoded(binary: bytes, schema: str, folder: Path) -> dict[str, Any]:
    (folder / "part.bin").write_bytes(binary)
    options = ["--json", "--strict-json", "--defaults-json", "-o", str(folder)]
    parts = [str(SCHEMA / schema), "--", str(folder / "part.bin")]
    subprocess.run(["flatc", *options, *parts], check=True)
    text: dict[str, Any] = json.loads((folder / "part.json").read_text())
    return text


def test_the_graph_names_every_tensor_and_has_no_nodes(tmp_path: Path) -> None:
    begin, _ = integers(VECTOR, "Q", 16384 - 48, 2)
    graph = decoded(VECTOR[24:begin], "graph.fbs", tmp_path)
    assert graph["version"] == "0"
    assert graph["mps_nodes"] == graph["input_ids"] == graph["output_ids"] == []
    values = [graph["mps_values"][number] for number in graph["constant_ids"]]
    tensors = read(VECTOR).tensors
    assert [
        (
            value["datatype"],
            tuple(value["dims"]),
            value["num_dims"],
            value["constant_buffer_size"],
            value["segment_offset"],
            value["constant_buffer"],
        )
        for value in values
    ] == [
        (tensor.dtype, tensor.shape, len(tensor.shape), len(tensor.data), tensor.file_offset - 16384, {"storage": []})
        for tensor in tensors.values()
    ]


def test_the_graph_of_xnnpack_has_every_tensor_as_a_constant_and_no_nodes(tmp_path: Path) -> None:
    vector = (VECTORS / "v1-xh00.pack").read_bytes()
    begin, nbytes = integers(vector, "I", 10, 2)
    graph = decoded(vector[begin : begin + nbytes], "xnn_graph.fbs", tmp_path)
    assert graph["version"] == "0"
    assert graph["xnodes"] == graph["xvalues"] == graph["input_ids"] == graph["output_ids"] == []
    reserved = {"offset": 0, "size": 0}
    assert graph["constant_data"] == [
        reserved,
        *({"offset": tensor.file_offset - 16384, "size": len(tensor.data)} for tensor in read(vector).tensors.values()),
    ]


def test_the_flatbuffer_of_a_ptd_names_every_tensor_with_its_header_in_it(tmp_path: Path) -> None:
    vector = (VECTORS / "v1-ft01.pack").read_bytes()
    (nbytes,) = integers(vector, "Q", 24, 1)
    tensors = decoded(vector[: 48 + nbytes], "flat_tensor.fbs", tmp_path)
    assert tensors["version"] == 0
    places = [
        (tensors["segments"][entry["segment_index"]], entry["key"], entry["tensor_layout"])
        for entry in tensors["named_data"]
    ]
    kinds = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "int64": "LONG"}
    assert places == [
        (
            {"offset": tensor.file_offset - 16384, "size": len(tensor.data)},
            name,
            {
                "scalar_type": kinds[tensor.dtype],
                "sizes": list(tensor.shape),
                "dim_order": list(range(len(tensor.shape))),
            },
        )
        for name, tensor in read(vector).tensors.items()
    ]


def test_the_index_has_the_columns_of_the_text(tmp_path: Path) -> None:
    begin, nbytes = integers(VECTOR, "Q", 16384 - 48, 2)
    index = decoded(VECTOR[begin : begin + nbytes], "index.fbs", tmp_path)
    assert bytes(index["names"]) == b"embed.weightnorm.biashead.weightemptystep"
    assert index["name_order"] == [0, 3, 2, 1, 4]
    assert index["buffer_offsets"] == [0, 256, 512]
    assert index["buffer_nbytes"] == [24, 6, 8]
    assert index["tensor_buffers"] == [0, 1, 0, 0xFFFFFFFF, 2]
    assert index["dtype_names"] == ["int64", "bfloat16", "float32"]
    assert index["dims"] == [2, 3, 3, 2, 3, 0, 4]
    assert bytes(index["note_text"]) == b"formatpt"


def test_the_generated_modules_are_what_the_compiler_makes_of_the_schemas(tmp_path: Path) -> None:
    version = subprocess.run(["flatc", "--version"], capture_output=True, text=True, check=True)
    if version.stdout.strip() != "flatc version 2.0.8":
        pytest.skip("other versions of the FlatBuffers compiler write other code")
    schemas = sorted(map(str, SCHEMA.glob("*.fbs")))
    subprocess.run(["flatc", "--python", "-o", str(tmp_path), *schemas], check=True)
    made = tmp_path / "stream_pack" / "format" / "schema" / "generated"
    kept = SCHEMA / "generated"
    assert {path.name: path.read_text() for path in kept.glob("*.py")} == {
        path.name: path.read_text() for path in made.glob("*.py")
    }


@pytest.mark.parametrize(
    "before",
    [2**31 - 1, 2**31, 2**32 - 16, 2**32, 2**57 + 16, 2**62 - 2**20],
    ids=["2**31-1", "2**31", "2**32-16", "2**32", "2**57+16", "2**62-2**20"],
)
def test_lengths_and_offsets_at_the_edges_of_integers_arrive_whole(before: int, tmp_path: Path) -> None:
    # FB#6942, FB#7536, FB#5081.  Two tensors: the length of the first decides the offset of the second.
    builder = CatalogBuilder()
    builder.add("first", BY_NAME["uint8"], (before,), storage=0, start=0)
    builder.add("second", BY_NAME["uint8"], (5,), storage=1, start=0)
    policy = Policy(Alignment(small=16, large=16, large_nbytes=16), block_nbytes=1 << 30)
    encoded = encode_head(plan(builder.build(storages_nbytes=0), policy), MPS)
    place = encoded.head.index_file_offset
    graph = decoded(encoded.front[24:place], "graph.fbs", tmp_path)
    index = decoded(encoded.front[place:], "index.fbs", tmp_path)
    offset = (before + 15) // 16 * 16
    values = [graph["mps_values"][number] for number in graph["constant_ids"]]
    assert [value["constant_buffer_size"] for value in values] == [before, 5]
    assert [value["segment_offset"] for value in values] == [0, offset]
    assert index["buffer_nbytes"] == [before, 5]
    assert index["buffer_offsets"] == [0, offset]
    assert index["dims"] == [before, 5]
    region = encoded.head.region_file_offset
    assert integers(encoded.front, "Q", 8, 2) == (region, (offset + 5 + 16383) // 16384 * 16384)
