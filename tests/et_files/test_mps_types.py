"""What is said of each MPSDataType, against the enum and the runtime of ExecuTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stream_pack.errors import RawPayloadError
from stream_pack.et_files.mps_types import MPS_TYPES, Runtime
from stream_pack.format import graph_mps
from stream_pack.reader.verify import verify
from tests.support.et_files import Constant, mps_payload
from tests.support.mps_types import ENUM, NUMBERS, TAKEN

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch" / "mps"
OUR_NAMES = {"complex_float16": "complex32", "complex_float32": "complex64"}
BITS = {"int4": 4, "uint4": 4, "bool": 8, "complex_float16": 32, "complex_float32": 64}


def nbytes_of(number: int, elements: int) -> int:
    """As many bytes as the type asks for; of a number that is none, one each."""
    name = ENUM.get(number, "invalid")
    digits = "".join(character for character in name if character.isdigit())
    return elements * BITS.get(name, int(digits or 8)) // 8


def test_the_table_is_the_enum() -> None:
    named = {number: OUR_NAMES.get(name, name) for number, name in ENUM.items() if number}
    assert {number: mps.name for number, mps in MPS_TYPES.items()} == named


def test_the_enum_is_that_of_files_that_executorch_wrote() -> None:
    seen = set()
    for path in VECTORS.glob("*.graph.json"):
        graph = json.loads(path.read_text())
        payload = path.with_name(path.name.replace(".graph.json", ".mp00")).read_bytes()
        found = graph_mps.decode(memoryview(payload)[24:])
        names = [graph["mps_values"][number]["datatype"] for number in found.ids.tolist()]
        assert [f"mps_data_type_{ENUM[number]}" for number in found.datatypes.tolist()] == names
        seen.update(names)
    assert len(seen) == 9


@pytest.mark.parametrize("number", NUMBERS)
def test_verify_lists_a_constant_of_each_type_that_the_runtime_aborts_on(number: int, tmp_path: Path) -> None:
    path = tmp_path / "payload"
    constant = Constant((16,), 0, nbytes=nbytes_of(number, 16), datatype=number)
    path.write_bytes(mps_payload([constant], bytes(256)))
    if ENUM.get(number) in TAKEN:
        with pytest.raises(RawPayloadError, match="no fault was seen"):
            verify(path)
    else:
        (damage,) = verify(path).damages
        assert "the MPS delegate aborts on it" in damage.message


def test_float64_is_the_one_type_that_the_runtime_takes_for_another() -> None:
    (one,) = (mps for mps in MPS_TYPES.values() if mps.runtime is Runtime.READS_AS_FLOAT32)
    assert one.name == "float64"
