"""Files that ExecuTorch wrote: what can be verified in them, and what is said of the rest."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack import ChecksumError, RawPayloadError, SourceChecksumError
from stream_pack.cli import main
from tests.sources.byte_sources import Dribble
from tests.support.bad_disk import environment, needs_compiler
from tests.support.et_files import Delegate, Named, mps_payload, program, ptd

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch"
WEIGHT, SCALE = bytes(range(200)), b"scales of it"
DIGEST, SCALE_DIGEST = (hashlib.sha256(data).hexdigest() for data in (WEIGHT, SCALE))
BASE, PITCH = 2048, 256
"""Segments begin at multiples of 256, so that padding follows each."""


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


def a_program(names: list[str], *, also: bytes = b"") -> bytes:
    """A program with a weight and its scales as named data, and a segment of constants of its own."""
    parts = [WEIGHT, SCALE, also]
    segments = [(PITCH * number, len(part)) for number, part in enumerate(parts)]
    named = [Named(name, number) for number, name in enumerate(names)]
    constants = (2, [0, 0]) if also else None
    head = program([], segments, named=named, constants=constants, base=BASE, segments_nbytes=3 * PITCH)
    return head + b"".join(part.ljust(PITCH, b"\0") for part in parts)


def a_data_file(names: list[str]) -> bytes:
    segments = [(0, len(WEIGHT)), (PITCH, len(SCALE))]
    named = [Named(name, number) for number, name in enumerate(names)]
    head = ptd(named, segments, region=BASE, region_nbytes=2 * PITCH)
    return head + WEIGHT.ljust(PITCH, b"\0") + SCALE.ljust(PITCH, b"\0")


@pytest.mark.parametrize("make", [a_program, a_data_file])
def test_data_that_are_called_by_their_sha256_are_verified_against_it(
    make: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    assert callable(make)
    data = make([DIGEST, f"scale_{SCALE_DIGEST}"])
    path.write_bytes(data)
    report = stream_pack.verify(path)
    assert (report.ok, report.tensors, report.nbytes) == (True, 2, 212)
    assert (report.unverified, report.unverified_nbytes) == (0, 0)
    assert main(["verify", str(path)]) == 0
    assert "no damage: 2 tensors, 0 blocks, 212 B verified" in capfd.readouterr().out
    for place, name, begin, nbytes in (
        (BASE, DIGEST, BASE, 200),
        (BASE + 199, DIGEST, BASE, 200),
        (BASE + PITCH + 5, f"scale_{SCALE_DIGEST}", BASE + PITCH, 12),
    ):
        changed = flipped(data, place)
        path.write_bytes(changed)
        (damage,) = stream_pack.verify(path).damages
        assert (damage.part, damage.tensors, damage.file_begin, damage.file_end) == (
            "data",
            (name,),
            begin,
            begin + nbytes,
        )
        assert isinstance(damage.error, ChecksumError)
        found = hashlib.sha256(changed[begin : begin + nbytes]).hexdigest()
        assert damage.message == (
            f"the data '{name}' (bytes {begin} to {begin + nbytes}) have another SHA-256 than their name: {found}"
        )
        listed = damage.to_json()
        assert (listed["expected"], listed["actual"]) == (name.removeprefix("scale_"), found)
        assert main(["verify", str(path), "--quiet"]) == 1
        capfd.readouterr()


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize("make", [a_program, a_data_file])
def test_damage_to_such_data_is_not_packed_as_if_it_were_whole(make: object, piped: bool, tmp_path: Path) -> None:
    """Checksums that a pack gets of its own would hide it for ever."""
    assert callable(make)
    data = make([DIGEST, f"scale_{SCALE_DIGEST}"])
    path, target = tmp_path / "file", tmp_path / "target"

    def convert(written: bytes, **options: str) -> str:
        path.write_bytes(written)
        return stream_pack.convert(Dribble(written, step=64) if piped else path, target, **options).verification  # type: ignore[arg-type]

    assert convert(data) == "SHA-256 of all data verified"
    assert stream_pack.inspect(path).checksums == "SHA-256 of each constant"
    target.unlink()
    for place, name in ((BASE, DIGEST), (BASE + 199, DIGEST), (BASE + PITCH + 5, f"scale_{SCALE_DIGEST}")):
        changed = flipped(data, place)
        with pytest.raises(SourceChecksumError, match=f"the data '{name}' .* have another SHA-256 than their name"):
            convert(changed)
        assert not target.exists()
        assert convert(changed, exclude=name) == "SHA-256 of all data verified"
        target.unlink()
    with pytest.raises(SourceChecksumError):
        stream_pack.extract(path, tmp_path / "target.npz")


def test_a_conversion_says_how_much_had_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(a_program([DIGEST, f"scale_{SCALE_DIGEST}"], also=b"constants of the program"))
    said = stream_pack.convert(path, tmp_path / "target").verification
    assert said == "SHA-256 of 2 data verified; 1 constant without a checksum"
    assert stream_pack.inspect(path).checksums == "SHA-256 of 2"
    path.write_bytes(flipped(a_program([f"x{DIGEST}", "scales"]), BASE))
    assert stream_pack.convert(path, tmp_path / "target").verification == "the source carries no checksum"


def test_padding_after_data_is_not_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(flipped(a_program([DIGEST, f"scale_{SCALE_DIGEST}"]), BASE + 200))
    assert stream_pack.verify(path).ok


@pytest.mark.parametrize("name", [DIGEST + "_so_blob", "x" + DIGEST, DIGEST[:-1], DIGEST.upper(), f"data_{DIGEST}"])
def test_other_names_are_no_digests(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(flipped(a_program([name, "scales"]), BASE))
    with pytest.raises(RawPayloadError, match="its 2 constants cannot be verified"):
        stream_pack.verify(path)


def test_every_byte_of_data_counts_in_files_of_executorchs_own(tmp_path: Path) -> None:
    for source in (VECTORS / "xnnpack" / "linear_fp16.pte", VECTORS / "ptd" / "mlp_xnnpack.ptd"):
        rows = stream_pack.inspect(source).rows
        assert stream_pack.verify(source).nbytes == sum(row.nbytes for row in rows)
        for row in rows:
            assert row.file_offset is not None
            for place in (row.file_offset, row.file_offset + row.nbytes - 1):
                (tmp_path / "file").write_bytes(flipped(source.read_bytes(), place))
                (damage,) = stream_pack.verify(tmp_path / "file").damages
                assert damage.tensors == (row.name,)


def test_what_cannot_be_verified_is_said_and_what_can_is_verified(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Half of a program is named by its digest; the 40 bytes of its own constants are not.
    path = tmp_path / "program"
    data = a_program([DIGEST, f"scale_{SCALE_DIGEST}"], also=bytes(range(40)))
    path.write_bytes(data)
    report = stream_pack.verify(path)
    assert (report.tensors, report.nbytes, report.unverified, report.unverified_nbytes) == (2, 212, 1, 40)
    assert main(["verify", str(path)]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0].endswith("no damage: 2 tensors, 0 blocks, 212 B verified")
    assert out[1] == f"{path}: 1 constant of 40 B could not be verified: ExecuTorch gives them no checksum"
    assert main(["verify", str(path), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["unverified"], printed["unverified_nbytes"]) == (1, 40)
    path.write_bytes(flipped(data, BASE))
    assert main(["verify", str(path)]) == 1


def test_a_sound_program_with_packs_and_a_constant_of_its_own_is_intact(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream_pack.save_file({"w": np.arange(6, dtype=np.float32)}, tmp_path / "pack")
    pack = (tmp_path / "pack").read_bytes()
    segments = [(0, len(pack)), (len(pack), 4)]
    head = program([Delegate(0)], segments, constants=(1, [0, 0]), base=16384, segments_nbytes=len(pack) + 4)
    path = tmp_path / "program"
    path.write_bytes(head + pack + b"\1\2\3\4")
    assert main(["verify", str(path)]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first.endswith("no damage: 1 tensor, 1 block, 24 B verified")
    assert second.startswith(f"{path}: 1 constant of 4 B could not be verified")


def test_where_nothing_can_be_verified_the_exit_code_is_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "payload"
    path.write_bytes(mps_payload([], b""))
    assert main(["verify", str(path)]) == 3
    assert (
        capfd.readouterr()
        .err.rstrip()
        .endswith(
            "a raw MP00 payload has no checksums, and no fault was seen: it holds no constants; if it was written as a "
            "pack, both its locator and its footer are damaged"
        )
    )
    path.write_bytes((VECTORS / "programs" / "portable.pte").read_bytes())
    assert main(["verify", str(path)]) == 3
    assert "an ExecuTorch program has no checksums, and no fault was seen: its 7 constants" in capfd.readouterr().err


@needs_compiler
def test_data_that_cannot_be_read_are_named_and_the_rest_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(flipped(a_program([DIGEST, f"scale_{SCALE_DIGEST}"]), BASE + PITCH))
    for damaged, code in ((1, 1), (0, 4)):
        done = subprocess.run(
            [sys.executable, "-m", "stream_pack", "verify", path],
            env=environment(path, BASE + 10, BASE + 11),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, "")
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"{path}: the data '{DIGEST}': bytes {BASE + 10} to ")
        assert lines[0].endswith("cannot be read: Input/output error")
        assert sum("have another SHA-256" in line for line in lines) == damaged
        path.write_bytes(a_program([DIGEST, f"scale_{SCALE_DIGEST}"]))
