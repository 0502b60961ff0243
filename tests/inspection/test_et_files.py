"""Looking at files that ExecuTorch wrote: what fills them, what is wrong with them, and packs inside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack import ChecksumError, FormatError, NotAPackError, RawPayloadError, TruncatedError
from stream_pack.cli import main
from stream_pack.format.header_kinds import KINDS
from stream_pack.inspection.inspect import inspect
from stream_pack.inspection.inspection import Inspection
from stream_pack.reader.verify import verify
from tests.support.et_files import Constant, Delegate, Named, mps_payload, program

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch"
FILES = sorted(path for path in VECTORS.glob("*/*") if path.suffix in {".pte", ".ptd", ".mp00", ".xh00"})
FAULTY = {"FAULT_float64_fp32", "FAULT_views_int32", "dtypes_all_fp32", "dtypes_supported_fp32"}
PACKS = VECTORS / "programs" / "packs.pte"
PACK_AT = (16384, 65536)


def described(path: Path) -> Inspection:
    description = inspect(path)
    assert description.kind != "pack"
    return description


def parts(description: Inspection) -> dict[str, int]:
    return {part.name: part.nbytes for part in description.parts}


# inspect


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_fills_a_file_adds_up_to_its_length(path: Path) -> None:
    description = described(path)
    assert sum(parts(description).values()) == description.nbytes == path.stat().st_size
    assert json.loads(json.dumps(description.to_json()))["nbytes"] == path.stat().st_size
    assert description.to_text()


@pytest.mark.parametrize("extra", [1, 100])
def test_bytes_that_follow_are_counted_apart(extra: int, tmp_path: Path) -> None:
    for source in (VECTORS / "ptd" / "mlp_portable.ptd", VECTORS / "mps" / "linear_fp16.pte"):
        path = tmp_path / "longer"
        path.write_bytes(source.read_bytes() + bytes(extra))
        description = described(path)
        assert parts(description)["trailing bytes"] == extra
        assert sum(parts(description).values()) == path.stat().st_size


def test_a_program_is_header_program_payload_and_named_data() -> None:
    # two_delegates_fp32: header of 40 bytes, flatbuffer up to 1616, two payloads of 720 bytes without constants,
    # named data of 1024 and 64 bytes.
    description = described(VECTORS / "xnnpack" / "two_delegates_fp32.pte")
    assert parts(description) == {
        "named data": 1024 + 64,
        "payload heads": 2 * 720,
        "header": 40,
        "program": 1616 - 40,
        "padding": 4288 - 1616 - 2 * 720 - 1024 - 64,
    }
    assert [(p.name, p.kind, p.nbytes, p.file_offset, len(p.keyed)) for p in description.payloads] == [
        ("forward/0", "xnnpack", 720, 1664, 2),
        ("forward/1", "xnnpack", 720, 1664 + 768, 2),
    ]
    assert {row.name for row in description.rows} == {key for payload in description.payloads for key in payload.keyed}


def test_what_is_stored_once_is_shown_with_all_who_use_it(tmp_path: Path) -> None:
    (payload,) = described(VECTORS / "programs" / "shared.pte").payloads
    assert payload.also_used_by == ("forward/1",)
    raw = mps_payload([Constant((4,), 0)], bytes(16))
    data = program(
        [Delegate(0)],
        [(0, len(raw)), (len(raw), 8)],
        named=[Named("one", 1), Named("two", 1)],
        base=1024,
        segments_nbytes=len(raw) + 8,
    )
    path = tmp_path / "program"
    path.write_bytes(data + raw + bytes(8))
    rows = {row.name: row for row in described(path).rows}
    assert described(path).rows[rows["one"].shared_with or 0].name == "two"
    assert "tied with" in described(path).to_text()


def test_a_segment_that_nobody_refers_to_is_called_so(tmp_path: Path) -> None:
    raw = mps_payload([Constant((4,), 0)], bytes(16))
    path = tmp_path / "program"
    path.write_bytes(
        program([Delegate(0)], [(0, len(raw)), (len(raw), 8)], base=1024, segments_nbytes=len(raw) + 8) + raw + bytes(8)
    )
    assert parts(described(path))["segments without a name"] == 8


def test_faults_stand_beside_the_constants_that_have_them(capfd: pytest.CaptureFixture[str]) -> None:
    path = VECTORS / "mps" / "FAULT_views_int32.pte"
    assert main(["inspect", str(path)]) == 0
    out, err = capfd.readouterr()
    assert out.count("FAULT: has 256 bytes") == 2
    assert err == ""


def test_inspect_says_where_packs_are_and_reads_them_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(PACKS), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert tuple(payload["file_offset"] for payload in found["payloads"]) == PACK_AT
    assert {payload["kind"] for payload in found["payloads"]} == {"pack"}
    for offset, names in zip(PACK_AT, (["layers.0.w", "layers.0.b"], ["layers.0.w"]), strict=True):
        assert main(["inspect", str(PACKS), "--offset", str(offset), "--json"]) == 0
        rows = json.loads(capfd.readouterr().out)["rows"]
        assert [row["name"] for row in rows] == names
        with stream_pack.open(PACKS, offset=offset) as pack:
            assert list(pack) == names
    with stream_pack.open(PACKS, offset=PACK_AT[0], verify="full") as pack:
        expected = np.arange(24, dtype=np.float32).reshape(4, 6)
        assert np.array_equal(pack["layers.0.w"].numpy(), expected)


def test_what_is_nothing_known_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, this is text")
    with pytest.raises(NotAPackError):
        inspect(tmp_path / "text")


# open


@pytest.mark.parametrize("path", sorted((VECTORS / "xnnpack").glob("*.inline.xh00")), ids=str)
def test_a_raw_xnnpack_payload_opens_with_its_numbers(path: Path) -> None:
    case, number, *_ = path.name.split(".")
    meta = json.loads((path.parent / f"{case}.meta.json").read_text())
    named = np.load(path.parent / f"{case}.named.npz")
    with stream_pack.open(path, kind="xnnpack") as pack:
        assert pack.kind == "xnnpack"
        for constant in meta["delegates"][int(number)]["constants"]:
            view = pack[str(constant["index"])]
            assert view.raw() == named[constant["named_key"]].tobytes()
            assert list(view.shape) == constant.get("dims", list(view.shape))
            assert view.numpy().nbytes == view.nbytes


def test_a_data_file_opens_with_its_names_and_the_runtimes_numbers(tmp_path: Path) -> None:
    with stream_pack.open(VECTORS / "ptd" / "mlp_portable.ptd", kind="ptd") as pack:
        state = {name: view.torch() for name, view in pack.items()}
    with np.load(VECTORS / "ptd" / "mlp.io.npz") as io:
        stored = {name: io[name] for name in io.files}
    for name, tensor in state.items():
        if name in stored:
            assert tensor.numpy().tobytes() == stored[name].tobytes()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()}["b.weight"] == (32, 64)


@pytest.mark.parametrize("kind", ["mps", "xnnpack", "ptd"])
def test_a_payload_opens_only_as_what_it_is(kind: str) -> None:
    paths = {
        "mps": VECTORS / "mps" / "linear_fp16.mp00",
        "xnnpack": VECTORS / "xnnpack" / "linear_fp16.0.inline.xh00",
        "ptd": VECTORS / "ptd" / "mlp_portable.ptd",
    }
    for other, path in paths.items():
        if other == kind:
            stream_pack.open(path, kind=KINDS[kind].name).close()
        else:
            with pytest.raises(NotAPackError, match=other):
                stream_pack.open(path, kind=KINDS[kind].name)


# verify


BY_DIGEST = {path for path in (VECTORS / "xnnpack").glob("*.pte") if "inline" not in path.name}
BY_DIGEST.remove(VECTORS / "xnnpack" / "rank5_mul_fp32.pte")  # which no delegate takes
BY_DIGEST |= {VECTORS / "ptd" / "mlp_xnnpack.ptd", VECTORS / "programs" / "mixed.pte"}


@pytest.mark.parametrize("path", [path for path in FILES if path != PACKS], ids=lambda path: path.name)
def test_verify_lists_faults_or_says_what_there_is_nothing_to_verify_against(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faulty = path.name.split(".")[0] in FAULTY
    code = main(["verify", str(path)])
    out, err = capfd.readouterr()
    if faulty:
        assert code == 1
        assert out.count("\n") == len(verify(path).damages) > 0
        assert err == ""
    elif path in BY_DIGEST:
        assert code == 0
        assert "no damage" in out
    else:
        assert code == 3
        assert out == ""
        assert "no checksums" in err
        with pytest.raises(RawPayloadError):
            verify(path)


def test_a_fault_is_told_with_its_tensor_and_byte_range() -> None:
    path = VECTORS / "mps" / "FAULT_views_int32.mp00"
    # Its meta.json: constants of 256 bytes at 832 + 0 and 832 + 320.
    damages = verify(path).damages
    assert [(d.part, d.tensors, d.file_begin, d.file_end) for d in damages] == [
        ("constant", ("1",), 832, 1088),
        ("constant", ("5",), 1152, 1408),
    ]
    assert "bytes 832 to 1088" in damages[0].message
    assert damages[0].to_json()["tensors"] == ["1"]


def test_packs_inside_a_program_are_verified_to_the_last_byte(tmp_path: Path) -> None:
    report = verify(PACKS)
    assert report.ok
    assert (report.tensors, report.blocks, report.nbytes) == (3, 3, 96 + 24 + 20)
    data = PACKS.read_bytes()
    path = tmp_path / "program"
    for offset in PACK_AT:
        with stream_pack.open(PACKS, offset=offset) as pack:
            place = offset + pack["layers.0.w"].file_offset + 5
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        (damage,) = verify(path).damages
        assert isinstance(damage.error, ChecksumError)
        assert damage.file_begin <= place < damage.file_end
        assert damage.tensors == ("layers.0.w",)
        assert main(["verify", str(path), "--quiet"]) == 1


def test_a_program_that_is_cut_says_how_much_is_missing(tmp_path: Path) -> None:
    # ET#14091
    data = (VECTORS / "xnnpack" / "tied_fp32.pte").read_bytes()
    path = tmp_path / "program"
    for nbytes in range(64, len(data), 37):
        path.write_bytes(data[:nbytes])
        report = verify(path)
        assert not report.ok
        error = report.damages[0].error
        lengths = [d.error for d in report.damages if isinstance(d.error, TruncatedError)]
        assert lengths, error
        assert lengths[0].actual_nbytes == nbytes


def test_a_broken_flatbuffer_is_damage(tmp_path: Path) -> None:
    data = bytearray((VECTORS / "xnnpack" / "tied_fp32.pte").read_bytes())
    data[0:4] = b"\xf0\xff\xff\xff"
    path = tmp_path / "program"
    path.write_bytes(data)
    (damage,) = verify(path).damages
    assert damage.part == "graph"
    assert isinstance(damage.error, FormatError)
