"""Raw MP00 payloads, written by ExecuTorch itself: what is sound is read, what contradicts itself is said to."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack import FormatError, NotAPackError, RawPayloadError, TruncatedError
from stream_pack.format import graph_mps
from stream_pack.format.dtypes import DTYPES
from stream_pack.inspection.inspect import inspect_pack
from tests.support.damage import Share, check_each, flipped, may_refuse, some_or_all
from tests.support.packs import pack_bytes, tensors

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch" / "mps"
CASES = sorted(path.stem for path in VECTORS.glob("*.mp00"))
# The names of the enum in ExecuTorch's schema, against the numbers in ours.
DATATYPES = {f"mps_data_type_{'bool' if d.name == 'bool' else d.name}": d.mps for d in DTYPES if d.mps}


def meta(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / f"{case}.meta.json").read_text())
    return found


def payload(case: str) -> Path:
    return VECTORS / f"{case}.mp00"


def is_wrong_about_itself(constant: dict[str, Any]) -> bool:
    return bool(constant["constant_buffer_size"] != constant["expected_nbytes"])


def test_the_vectors_are_there() -> None:
    assert len(CASES) >= 12


@pytest.mark.parametrize("case", CASES)
def test_every_constant_is_the_tensor_that_the_module_has(case: str) -> None:
    # ET#4574
    expected = np.load(VECTORS / f"{case}.expected.npz")
    constants = meta(case)["constants"]
    with stream_pack.open(payload(case), kind="mps") as pack:
        assert pack.kind == "mps"
        assert list(pack) == [str(constant["id"]) for constant in constants]
        for constant in constants:
            view = pack[str(constant["id"])]
            begin = meta(case)["header"]["const_off"] + constant["segment_offset"]
            stored = payload(case).read_bytes()[begin : begin + constant["constant_buffer_size"]]
            assert view.raw() == stored
            assert view.file_offset == begin
            assert list(view.shape) == constant["fb_dims"]
            if is_wrong_about_itself(constant):
                continue
            wanted = expected[f"id{constant['id']}"]
            assert view.numpy().tobytes() == wanted.tobytes() == stored
            assert view.torch().shape == view.shape
            assert bytes(view.torch().contiguous().view(-1).view(torch.uint8).numpy()) == stored


def test_constants_that_contradict_themselves_are_bytes_only() -> None:
    # Stock faults: a view that stores its whole storage, float64 labelled float32.
    refused = []
    for case in CASES:
        with stream_pack.open(payload(case), kind="mps") as pack:
            for constant in meta(case)["constants"]:
                if not is_wrong_about_itself(constant):
                    continue
                refused.append(case)
                view = pack[str(constant["id"])]
                part = pack.get_slice(str(constant["id"]))
                for typed in (view.numpy, view.torch, view.materialize, pack.materialize, lambda p=part: p[0:1]):
                    with pytest.raises(FormatError, match=f"{constant['constant_buffer_size']} bytes") as caught:
                        typed()
                    assert str(constant["expected_nbytes"]) in str(caught.value)
                assert len(view.raw()) == constant["constant_buffer_size"]
    assert refused == ["FAULT_float64_fp32", "FAULT_views_int32", "FAULT_views_int32"]


@pytest.mark.parametrize("case", CASES)
def test_the_graph_decodes_to_what_executorchs_own_schema_says(case: str) -> None:
    wanted = json.loads((VECTORS / f"{case}.graph.json").read_text())
    region = meta(case)["header"]["const_off"]
    found = graph_mps.decode(memoryview(payload(case).read_bytes())[24:region])
    assert found.ids.tolist() == wanted["constant_ids"]
    values = [wanted["mps_values"][number] for number in wanted["constant_ids"]]
    assert found.nbytes.tolist() == [value["constant_buffer_size"] for value in values]
    assert found.offsets.tolist() == [value["segment_offset"] for value in values]
    assert found.num_dims.tolist() == [value["num_dims"] for value in values]
    assert found.datatypes.tolist() == [DATATYPES[value["datatype"]] for value in values]
    assert [found.dims.row(row).tolist() for row in range(len(found.dims))] == [value["dims"] for value in values]


def test_what_is_misaligned_is_in_place_for_numpy_and_copied_for_torch(tmp_path: Path) -> None:
    # ExecuTorch's offsets are a running sum, and a payload may stand anywhere in a program.
    path = tmp_path / "program"
    data = payload("linear_fp16").read_bytes()
    path.write_bytes(b"\xff" + data)
    with stream_pack.open(path, kind="mps", offset=1, nbytes=len(data)) as pack:
        for view in pack.values():
            array, tensor = view.numpy(), view.torch()
            assert array.ctypes.data % 2 == 1
            assert tensor.data_ptr() % 2 == 0
            assert tensor.numpy().tobytes() == array.tobytes() == view.raw()
            tensor += 1
    assert path.read_bytes()[1:] == data


def test_a_raw_payload_opens_only_when_asked_for() -> None:
    for case in CASES:
        with pytest.raises(RawPayloadError, match="kind='mps'"):
            stream_pack.open(payload(case))


def test_there_is_nothing_to_verify_a_raw_payload_against() -> None:
    from stream_pack.reader.verify import verify

    path = payload("linear_fp16")
    for mode in ("lazy", "full"):
        with pytest.raises(RawPayloadError, match="nothing"):
            stream_pack.open(path, kind="mps", verify=mode)
    with stream_pack.open(path, kind="mps") as pack, pytest.raises(RawPayloadError):
        pack.verify()
    with pytest.raises(RawPayloadError):
        verify(path)


def test_a_pack_is_a_payload_too(tmp_path: Path) -> None:
    pack_bytes(tmp_path / "pack")
    with stream_pack.open(tmp_path / "pack", kind="mps") as pack:
        assert list(pack) == [str(number) for number in range(7)]
        for number, tensor in enumerate(tensors().values()):
            assert torch.equal(pack[str(number)].torch(), tensor)
        tied = [pack[name].torch() for name in ("0", "2", "3")]  # embed, head, rows
        assert len({tensor.untyped_storage()._cdata for tensor in tied}) == 1


def test_a_description_of_a_payload_adds_up_and_shows_the_faults() -> None:
    for case in CASES:
        with stream_pack.open(payload(case), kind="mps") as pack:
            description = inspect_pack(pack)
        assert sum(part.nbytes for part in description.parts) == payload(case).stat().st_size
        assert description.to_text().count("FAULT") == sum(map(is_wrong_about_itself, meta(case)["constants"]))


@pytest.mark.parametrize("case", ["linear_fp16", "metal_kernel.0"])
def test_a_cut_payload_is_truncated(case: str, tmp_path: Path) -> None:
    data = payload(case).read_bytes()
    path = tmp_path / "cut"
    for nbytes in range(len(data) - 1, 7, -len(data) // 60):
        path.write_bytes(data[:nbytes])
        with pytest.raises(TruncatedError):
            stream_pack.open(path, kind="mps")
    path.write_bytes(data[:5])
    with pytest.raises(NotAPackError):
        stream_pack.open(path, kind="mps")


EDGES = (1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def test_no_position_in_a_payload_leads_outside(tmp_path: Path) -> None:
    # ET#19285: every u64 of the constants, and the header's, at every edge
    case = "dtypes_supported_fp32"
    data = payload(case).read_bytes()
    header = meta(case)["header"]
    path = tmp_path / "payload"
    fields = [8, 16]
    for constant in meta(case)["constants"]:
        pair = struct.pack("<Q", constant["constant_buffer_size"])
        fields += [at for at in range(24, header["const_off"] - 8) if data[at : at + 8] == pair]
    assert len(fields) > 10
    for field in set(fields):
        for value in EDGES:
            changed = bytearray(data)
            struct.pack_into("<Q", changed, field, value)
            path.write_bytes(changed)
            with may_refuse(FormatError, TruncatedError), stream_pack.open(path, kind="mps") as pack:
                for view in pack.values():
                    assert 0 <= view.file_offset <= view.file_offset + len(view.raw()) <= len(data)


@some_or_all(5)
def test_a_payload_with_any_byte_flipped_is_an_error_of_ours_or_stays_within_its_region(
    share: Share, tmp_path: Path
) -> None:
    # FB#5098, FB#7303: read before verifying, in a format that has nothing to verify against
    case = "metal_kernel.0"
    data = payload(case).read_bytes()
    region = meta(case)["header"]["const_off"]
    path = tmp_path / "payload"

    def check(changed: bytes) -> None:
        path.write_bytes(changed)
        with may_refuse(FormatError, NotAPackError, TruncatedError), stream_pack.open(path, kind="mps") as pack:
            for view in pack.values():
                assert len(view.raw()) == view.nbytes
                assert view.file_offset + view.nbytes <= len(data)
                for typed in (view.numpy, view.torch):
                    with may_refuse(FormatError), suppress(TypeError):
                        assert typed().nbytes == view.nbytes

    check_each(flipped(data, range(region), masks=(0x01, 0xFF), share=share), check)
