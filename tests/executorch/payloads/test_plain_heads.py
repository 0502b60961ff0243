"""Plain packs of kind ``xnnpack`` and ``ptd``, read by ExecuTorch's own schemas, compiler and header classes."""

from __future__ import annotations

from pathlib import Path

from executorch.backends.xnnpack import serialization as xnnpack
from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorHeader, _deserialize_to_flat_tensor

from tests.executorch.flatc import decoded
from tests.vectors.minimal_reader import read

VECTORS = Path(__file__).parents[2] / "vectors"


def test_xnnpacks_header_and_schema_find_every_tensor() -> None:
    data = (VECTORS / "v1-xh00.pack").read_bytes()
    header = XNNHeader.from_bytes(data[: XNNHeader.EXPECTED_LENGTH])
    assert header.is_valid()
    assert (header.constant_data_offset, header.constant_data_size) == (16384, 16384)
    end = header.flatbuffer_offset + header.flatbuffer_size
    graph = decoded(data[header.flatbuffer_offset : end], xnnpack.__name__)
    assert graph["xnodes"] == graph["xvalues"] == graph["input_ids"] == graph["output_ids"] == []
    _, *constants = graph["constant_data"]
    assert [data[16384 + constant["offset"] :][: constant["size"]] for constant in constants] == [
        tensor.data for tensor in read(data).tensors.values()
    ]


def test_flat_tensors_header_and_schema_find_every_tensor() -> None:
    data = (VECTORS / "v1-ft01.pack").read_bytes()
    header = FlatTensorHeader.from_bytes(data[8:])
    assert header.is_valid()
    assert (header.segment_base_offset, header.segment_data_size) == (16384, 16384)
    found = _deserialize_to_flat_tensor(data[: header.flatbuffer_offset + header.flatbuffer_size])
    assert found.version == 0
    tensors = read(data).tensors
    assert [entry.key for entry in found.named_data] == list(tensors)
    for entry, tensor in zip(found.named_data, tensors.values(), strict=True):
        segment = found.segments[entry.segment_index]
        assert data[16384 + segment.offset :][: segment.size] == tensor.data
        assert entry.tensor_layout is not None
        assert entry.tensor_layout.sizes == list(tensor.shape)
