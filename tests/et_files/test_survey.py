"""What is found in files that ExecuTorch wrote, against what ExecuTorch itself says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream_pack.et_files.constants import Constants, Fault
from stream_pack.et_files.survey import Survey, survey_payload, survey_program
from tests.support.et_files import Constant, Delegate, Named, mps_payload, program, ptd
from tests.support.et_files import xnnpack_payload as xnnpack

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch"
MPS = sorted(path.stem for path in (VECTORS / "mps").glob("*.mp00"))
XNNPACK = sorted(path.stem for path in (VECTORS / "xnnpack").glob("*.named.npz"))
XNNPACK = [case.removesuffix(".named") for case in XNNPACK]
PTD_FLOAT = 6  # ScalarType


class Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.nbytes: int | None = len(data)

    def read(self, begin: int, nbytes: int) -> memoryview:
        return self._data[begin : begin + nbytes]

    def keep(self, begin: int, end: int) -> None:
        pass


def survey(data: bytes) -> Survey:
    read = survey_program if data[4:8] == b"ET12" else survey_payload
    return read(Bytes(data))


def meta(kind: str, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / kind / f"{case}.meta.json").read_text())
    return found


def arrays(data: bytes, constants: Constants) -> dict[str, Any]:
    """The constants by name, as NumPy sees their bytes."""
    found = {}
    for row, name in enumerate(constants.names):
        begin = int(constants.file_offsets[row])
        stored = data[begin : begin + int(constants.nbytes[row])]
        dtype = constants.dtype_name(row)
        numpy = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
        found[name] = np.frombuffer(stored, numpy).reshape(constants.shape(row))
    return found


def faults(found: Survey) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(fault.part, fault.names, fault.fatal) for fault in found.faults]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


# What ExecuTorch wrote


@pytest.mark.parametrize("case", MPS)
def test_the_faults_of_a_payload_are_those_that_its_maker_listed(case: str) -> None:
    expected = []
    for constant in meta("mps", case)["constants"]:
        for text in constant["faults"]:
            if text.startswith("size"):
                expected.append((str(constant["id"]), "bytes; ", True))
            elif text.startswith("offset"):
                expected.append((str(constant["id"]), "not a multiple of", False))
            elif text.startswith("datatype aborts"):
                expected.append((str(constant["id"]), "aborts", False))
            else:
                assert text == "bytes differ from the tensor"  # which nobody sees from outside
    found = survey((VECTORS / "mps" / f"{case}.mp00").read_bytes())
    assert sorted(fault.names[0] for fault in found.faults) == sorted(n for n, _, _ in expected)
    for name, text, fatal in expected:
        assert any(fault.names == (name,) and text in fault.text and fault.fatal == fatal for fault in found.faults)


def test_there_are_faults_of_each_of_these_kinds_among_the_vectors() -> None:
    texts = [text for case in MPS for c in meta("mps", case)["constants"] for text in c["faults"]]
    assert len(texts) >= 11


@pytest.mark.parametrize("case", [case for case in MPS if not case.startswith(("FAULT", "metal"))])
def test_a_program_has_the_constants_of_its_mps_payload_as_the_module_has_them(case: str) -> None:
    data = (VECTORS / "mps" / f"{case}.pte").read_bytes()
    with np.load(VECTORS / "mps" / f"{case}.expected.npz") as file:
        expected = {f"forward/0/{name.removeprefix('id')}": file[name] for name in file.files}
    found = arrays(data, survey(data).constants)
    # What the partitioner left to the program itself is not in the list.
    assert_equal({n: a for n, a in found.items() if n.startswith("forward")}, expected)


def test_each_payload_of_a_program_is_found() -> None:
    data = (VECTORS / "mps" / "metal_kernel.pte").read_bytes()
    found = survey(data)
    assert [payload.users for payload in found.payloads] == [("forward/0",), ("forward/1",)]
    assert {payload.backend for payload in found.payloads} == {"MPSBackend"}
    for number, payload in enumerate(found.payloads):
        whole = (VECTORS / "mps" / f"metal_kernel.{number}.mp00").read_bytes()
        assert data[payload.file_offset : payload.file_offset + payload.nbytes] == whole


@pytest.mark.parametrize("case", XNNPACK)
def test_named_data_of_a_program_are_what_its_xnnpack_payloads_say_they_are(case: str) -> None:
    data = (VECTORS / "xnnpack" / f"{case}.pte").read_bytes()
    found = survey(data)
    constants = found.constants
    with np.load(VECTORS / "xnnpack" / f"{case}.named.npz") as file:
        stored = {name: file[name].tobytes() for name in file.files}
    by_key = {name: row for row, name in enumerate(constants.names) if name in stored}
    assert sorted(by_key) == sorted(stored)
    for name, row in by_key.items():
        begin = int(constants.file_offsets[row])
        assert data[begin : begin + int(constants.nbytes[row])] == stored[name]
    described = [c for d in meta("xnnpack", case)["delegates"] for c in d["constants"]]
    for constant in described:
        if "dims" in constant:
            row = by_key[constant["named_key"]]
            assert list(constants.shape(row)) == constant["dims"]
            assert (
                constants.dtype_name(row)
                == {"xnn_datatype_fp32": "float32", "xnn_datatype_fp16": "float16", "xnn_datatype_qcint8": "int8"}[
                    constant["datatype"]
                ]
            )
    assert found.faults == ()
    assert found.external == 0


@pytest.mark.parametrize("case", XNNPACK)
def test_inline_constants_of_xnnpack_are_found_where_they_were_put(case: str) -> None:
    for number, delegate in enumerate(meta("xnnpack", case)["delegates"]):
        data = (VECTORS / "xnnpack" / f"{case}.{number}.inline.xh00").read_bytes()
        found = survey(data)
        region = delegate["inline_header"]["c_off"]
        assert found.faults == ()
        assert list(found.constants.names) == [str(c["index"]) for c in delegate["constants"]]
        assert found.constants.file_offsets.tolist() == [region + c["inline_offset"] for c in delegate["constants"]]
        assert found.constants.nbytes.tolist() == [c["size"] for c in delegate["constants"]]


def test_a_payload_whose_constants_all_lie_elsewhere_says_how_many() -> None:
    found = survey((VECTORS / "xnnpack" / "linear_dynamic_qcs8.0.xh00").read_bytes())
    expected = meta("xnnpack", "linear_dynamic_qcs8")["delegates"][0]["constants"]
    assert (len(found.constants), found.external) == (0, len(expected))


def test_a_data_file_has_the_tensors_that_the_program_expects() -> None:
    found = survey((VECTORS / "ptd" / "mlp_portable.ptd").read_bytes())
    layouts = {n: found.constants.shape(row) for row, n in enumerate(found.constants.names)}
    assert layouts == {
        "a.weight": (64, 32),
        "a.bias": (64,),
        "b.weight": (32, 64),
        "b.bias": (32,),
        "c.weight": (7, 32),
    }
    assert found.faults == ()
    elsewhere = survey((VECTORS / "ptd" / "mlp_portable.pte").read_bytes())
    assert (len(elsewhere.constants), elsewhere.external) == (0, len(layouts))


def test_a_data_file_without_layouts_is_bytes() -> None:
    found = survey((VECTORS / "ptd" / "mlp_xnnpack.ptd").read_bytes()).constants
    assert {found.dtype_name(row) for row in range(len(found))} == {"uint8"}
    assert sorted(found.nbytes.tolist()) == sorted([8192, 256, 8192, 128, 896])


@pytest.mark.parametrize("case", ["portable", "inline", "mixed"])
def test_constants_that_no_delegate_took_are_those_of_the_module(case: str) -> None:
    data = (VECTORS / "programs" / f"{case}.pte").read_bytes()
    constants = survey(data).constants
    found = arrays(data, constants)
    with np.load(VECTORS / "programs" / "portable.npz") as module:
        wanted = {name: module[name] for name in ("emb.weight", "idx", "halved")}
        if case == "portable":
            wanted |= {name: module[name] for name in ("lin.weight", "lin.bias")}
    own = [array for name, array in found.items() if name.startswith("constant/")]
    for array in wanted.values():
        assert any(
            one.dtype == array.dtype and one.shape == array.shape and one.tobytes() == array.tobytes() for one in own
        )


def test_the_initial_state_of_what_a_method_changes_is_found() -> None:
    data = (VECTORS / "programs" / "mutable.pte").read_bytes()
    found = arrays(data, survey(data).constants)
    with np.load(VECTORS / "programs" / "mutable.npz") as module:
        assert_equal(
            {name: found[name] for name in ("mutable/0/1", "mutable/0/2", "constant/1")},
            {"mutable/0/1": module["state"], "mutable/0/2": module["steps"], "constant/1": module["scale"]},
        )


def test_a_tensor_in_channels_last_has_its_sizes_and_the_order_of_its_bytes() -> None:
    data = (VECTORS / "programs" / "channels_last.pte").read_bytes()
    constants = survey(data).constants
    assert (constants.shape(0), constants.orders) == ((2, 3, 2, 4), {0: (0, 2, 3, 1)})
    begin = int(constants.file_offsets[0])
    logical = np.arange(48, dtype=np.float32).reshape(2, 3, 2, 4)
    assert data[begin : begin + 192] == logical.transpose(0, 2, 3, 1).tobytes()


def test_an_order_that_only_moves_dims_of_one_is_row_major() -> None:
    sizes, orders = [(8, 3, 1, 1), (1, 5), (2, 1, 3), (4, 0, 2)], [(0, 2, 3, 1), (1, 0), (0, 2, 1), (2, 1, 0)]
    named = [Named(str(k), 0, PTD_FLOAT, *pair) for k, pair in enumerate(zip(sizes, orders))]
    found = survey(ptd(named, [(0, 96)], region=1024, region_nbytes=96) + bytes(96))
    assert found.constants.orders == {}
    assert [found.constants.shape(row) for row in range(4)] == sizes


def test_a_payload_that_two_delegates_share_is_one() -> None:
    (payload,) = survey((VECTORS / "programs" / "shared.pte").read_bytes()).payloads
    assert payload.users == ("forward/0", "forward/1")


def test_packs_inside_a_program_are_left_to_those_who_read_packs() -> None:
    found = survey((VECTORS / "programs" / "packs.pte").read_bytes())
    assert [payload.kind for payload in found.payloads] == ["pack", "pack"]
    assert len(found.constants) == 0


# What ExecuTorch would not notice


def test_constants_that_partly_overlap_are_named_both_with_the_bytes_they_share() -> None:
    data = mps_payload([Constant((4,), 0), Constant((4,), 8), Constant((1,), 4)], bytes(24))
    (fault,) = survey(data).faults
    region = len(data) - 24
    assert fault == Fault("constant", "constants '0' and '1' overlap in 8 bytes", region + 8, region + 16, ("0", "1"))


def test_a_constant_inside_another_is_a_view_and_no_fault() -> None:
    assert survey(mps_payload([Constant((4,), 0), Constant((2,), 8)], bytes(16))).faults == ()


@pytest.mark.parametrize(
    ("constant", "part", "text", "fatal"),
    [
        (Constant((0, 3), 0), "constant", "no bytes", False),
        (Constant((2,), 0, nbytes=4), "constant", "4 bytes; float32 of shape [2] has 8", True),
        (Constant((2,), 2), "constant", "not a multiple of 4", False),
        (Constant((2,), 12), "range", "outside the 16 bytes", True),
        (Constant((2,), 2**64 - 4), "range", "outside the 16 bytes", True),
        (Constant((2,), 0, nbytes=2**64 - 1), "range", "outside the 16 bytes", True),
        (Constant((2,), 0, num_dims=1000), "constant", "has num_dims 1000, but 1 dims", True),
        (Constant((-2,), 0, nbytes=8), "constant", "negative dim", True),
        (Constant((2**31 - 1,) * 4, 0, nbytes=8), "constant", "2**62", True),
        (Constant((2,), 0, datatype=4, nbytes=4), "constant", "bfloat16: the MPS", False),
        (Constant((2,), 0, datatype=11, nbytes=2), "constant", "uint8: the MPS", False),
        (Constant((2,), 0, datatype=17, nbytes=16), "constant", "complex64: the MPS", False),
        (Constant((2,), 0, datatype=77), "constant", "invalid: the MPS", False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_constant_is_faulted_for(constant: Constant, part: str, text: str, fatal: bool) -> None:
    padded = mps_payload([constant, Constant((1,), 12)], bytes(16))
    (fault,) = (fault for fault in survey(padded).faults if fault.names != ("1",))
    assert (fault.part, fault.names, fault.fatal) == (part, ("0",), fatal)
    assert text in fault.text


def test_a_constant_that_is_named_twice_is_told() -> None:
    found = survey(mps_payload([Constant((4,), 0), Constant((4,), 0)], bytes(16), ids=[1, 1]))
    assert faults(found) == [("names", (), True)]
    assert len(found.constants) == 0


def test_quantized_weights_come_with_what_their_numbers_are_called() -> None:
    int4 = Constant((2, 6), 0, nbytes=6, datatype=8)
    found = survey(xnnpack([int4, Constant((2,), 8, datatype=1)], bytes(16)))
    assert found.faults == ()
    assert [found.constants.dtype_name(row) for row in range(2)] == ["uint4", "float32"]
    assert found.constants.notes == {0: {"xnnpack.datatype": "qcint4"}}


def test_a_constant_by_key_without_a_key_leads_nowhere() -> None:
    offset = 0x1122334455667788
    data = xnnpack([Constant((2,), offset, datatype=1)], bytes(8))
    data = data.replace(offset.to_bytes(8, "little"), b"\xff" * 8)
    found = survey(data)
    assert faults(found) == [("graph", (), True)]


def test_names_of_a_data_file_are_unique_and_their_segments_inside() -> None:
    segments = [(0, 16), (16, 64)]
    head = ptd(
        [Named("a", 0, PTD_FLOAT, (4,), (0,)), Named("a", 0), Named("b", 1), Named("c", 0, 12)],
        segments,
        region=1024,
        region_nbytes=32,
    )
    found = survey(head + bytes(32))
    assert faults(found) == [("range", ("b",), True), ("names", ("a",), True)]
    assert found.fatal_fault is not None


def test_a_dim_order_that_is_none_is_a_fault() -> None:
    head = ptd(
        [Named("a", 0, PTD_FLOAT, (2, 2), (1, 1)), Named("b", 0, PTD_FLOAT, (2, 2), (1, 0))],
        [(0, 16)],
        region=1024,
        region_nbytes=16,
    )
    found = survey(head + bytes(16))
    assert faults(found) == [("constant", ("a",), True)]
    assert found.fatal_fault is None


BASE = 2048


def whole_program(payload: bytes, **changes: Any) -> bytes:
    arguments: dict[str, Any] = {
        "delegates": [Delegate(0)],
        "segments": [(0, len(payload)), (len(payload), 8)],
        "named": [Named("key", 1)],
        "base": BASE,
        "segments_nbytes": len(payload) + 8,
    }
    arguments |= changes
    return program(**arguments) + payload + bytes(8)


def test_segments_that_are_not_there_are_told() -> None:
    payload = mps_payload([Constant((4,), 0)], bytes(16))
    assert survey(whole_program(payload)).faults == ()
    for changes, expected in (
        ({"segments": [(0, len(payload)), (len(payload), 9)]}, [("segment", (), True)]),
        ({"segments": [(0, len(payload)), (2**64 - 8, 8)]}, [("segment", (), True)]),
        ({"named": [Named("key", 2)]}, [("segment", ("key",), True)]),
        ({"named": [Named("key", 1), Named("key", 1)]}, [("names", ("key",), True)]),
        ({"delegates": [Delegate(0), Delegate(9)]}, [("graph", (), True)]),
        ({"constants": (7, [0])}, [("segment", (), True)]),
        ({"constants": (1, [0, 0, 9])}, [("range", ("constant/2",), True)]),
        ({"segments_nbytes": len(payload) + 9}, [("length", (), True)]),
        ({"segments_nbytes": 2**64 - 1}, [("length", (), True)]),
    ):
        found = survey(whole_program(payload, **changes))
        assert faults(found) == expected, changes


def test_a_payload_that_is_cut_is_told_with_its_delegate() -> None:
    payload = mps_payload([Constant((4,), 0)], bytes(16))
    found = survey(whole_program(payload, segments=[(0, len(payload) - 1), (0, 0)]))
    (fault,) = found.faults
    assert fault.fatal
    assert "forward/0" in fault.text
    assert f"expected {len(payload)} bytes, found {len(payload) - 1}" in fault.text


def test_names_that_collide_are_told_apart() -> None:
    payload = mps_payload([Constant((4,), 0)], bytes(16))
    found = survey(whole_program(payload, named=[Named("forward/0/0", 1)]))
    assert list(found.constants.names) == ["forward/0/0", "forward/0/0#2"]


def test_what_another_backend_made_is_left_as_it_is() -> None:
    found = survey(whole_program(b"VK00" * 10, delegates=[Delegate(0, "VulkanBackend")]))
    assert [(payload.kind, payload.backend) for payload in found.payloads] == [("other", "VulkanBackend")]
    assert list(found.constants.names) == ["key"]
    assert found.faults == ()
