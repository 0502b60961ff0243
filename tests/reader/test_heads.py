"""One reader for packs with any of the three headers, and none for files of ExecuTorch's own that begin alike."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import stream_pack
from stream_pack import ChecksumError, FormatError, NewerVersionError, NotAPackError, RawPayloadError, TruncatedError
from stream_pack.format.header import To
from stream_pack.format.header_kinds import KINDS
from stream_pack.inspection.inspect import inspect_pack
from stream_pack.metal.plan import plan_metal
from stream_pack.reader.verify import verify
from tests.support.damage import may_refuse
from tests.support.packs import pack_bytes, places, reseal, tensors

FOLDER = Path(__file__).parent.parent / "vectors"
VECTORS: dict[To, bytes] = {
    "mps": (FOLDER / "v1-mp00.pack").read_bytes(),
    "xnnpack": (FOLDER / "v1-xh00.pack").read_bytes(),
    "ptd": (FOLDER / "v1-ft01.pack").read_bytes(),
}
every_kind = pytest.mark.parametrize("to", VECTORS)
SAMPLE = 97
"""Every byte that is not zero is changed; of the zeros, one in so many."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


@every_kind
def test_every_way_of_reading_works_on_every_kind(to: To, path: Path) -> None:
    pack_bytes(path, to=to)
    wanted = tensors()
    with stream_pack.open(path, verify="full") as pack:
        assert pack.kind == "pack"
        assert pack._head.kind is KINDS[to]
        assert list(pack) == list(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(pack[name].torch(), tensor)
    with stream_pack.open(path, verify="lazy") as pack:
        assert torch.equal(pack["rows"].torch(), wanted["rows"])
    loaded = stream_pack.load_file(path)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in wanted.items()
    }
    with stream_pack.safe_open(path, framework="pt") as file:
        assert file.get_tensor("norm").tolist() == wanted["norm"].tolist()
    report = verify(path)
    assert (report.ok, report.blocks, report.tensors) == (True, 6, 7)


@every_kind
def test_kinds_differ_for_a_gpu_in_nothing(to: To, path: Path) -> None:
    pack_bytes(path, {"large": torch.zeros(1 << 19), "small": torch.ones(3)}, to=to)
    with stream_pack.open(path) as pack:
        assert pack["large"].file_offset % 16384 == 0
        plan = plan_metal(pack)
    pack_bytes(path, {"large": torch.zeros(1 << 19), "small": torch.ones(3)})
    with stream_pack.open(path) as pack:
        assert plan_metal(pack).summary() == plan.summary()


@every_kind
@pytest.mark.parametrize("header_nbytes", [{"mps": 24, "xnnpack": 32, "ptd": 56}])
def test_the_parts_fill_the_file(to: To, header_nbytes: dict[To, int], path: Path) -> None:
    path.write_bytes(VECTORS[to])
    with stream_pack.open(path) as pack:
        description = inspect_pack(pack)
    parts = {part.name: part.nbytes for part in description.parts}
    assert description.head == description.to_json()["head"] == to
    words = {"mps": "", "xnnpack": "a payload of its XNNPACK delegate", "ptd": "a .ptd"}[to]
    assert description.to_text().count("ExecuTorch reads it as") == bool(words)
    assert words in description.to_text()
    at = places(VECTORS[to])
    assert parts["header"] == header_nbytes[to]
    assert parts["header"] + parts["graph"] == at.index
    assert sum(parts.values()) == len(VECTORS[to])


@every_kind
@pytest.mark.parametrize("before", [0, 4096, 12345])
def test_packs_of_every_kind_open_inside_other_files(to: To, before: int, path: Path) -> None:
    path.write_bytes(os.urandom(before) + VECTORS[to] + b"more")
    with stream_pack.open(path, offset=before, verify="full", nbytes=len(VECTORS[to])) as pack:
        assert pack["step"].numpy() == 7


@pytest.mark.parametrize("place", [8, 10, 14, 22, 30])
def test_a_flipped_bit_in_the_header_of_xnnpack_is_found(place: int, path: Path) -> None:
    changed = bytearray(VECTORS["xnnpack"])
    changed[place] ^= 1
    path.write_bytes(changed)
    with pytest.raises((FormatError, ChecksumError)):
        stream_pack.open(path)
    assert not verify(path).ok


@pytest.mark.parametrize("to", ["xnnpack", "ptd"])
def test_every_flipped_byte_is_detected(to: To, path: Path) -> None:
    data = VECTORS[to]
    path.write_bytes(data)
    undetected = []
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(len(data)):
            if not data[at] and at % SAMPLE:
                continue
            for bit in range(8) if at < 56 or at >= len(data) - 48 else (at % 8,):
                memory[at] ^= 1 << bit
                with may_refuse(NotAPackError, NewerVersionError):
                    if verify(path, jobs=1).ok:
                        undetected.append(at)
                memory[at] ^= 1 << bit
    assert undetected == []
    assert verify(path).ok


@pytest.mark.parametrize("to", ["xnnpack", "ptd"])
def test_a_cut_file_is_truncated_or_no_pack_wherever_it_is_cut(to: To, path: Path) -> None:
    data = VECTORS[to]
    path.write_bytes(data)
    for nbytes in [*range(len(data) - 1, len(data) - 80, -1), *range(len(data) - 80, 0, -SAMPLE)]:
        os.truncate(path, nbytes)
        with pytest.raises(TruncatedError):
            stream_pack.open(path)
        with pytest.raises(TruncatedError):
            stream_pack.convert(path, path.with_name("target"))
    magic_nbytes = {"xnnpack": 8, "ptd": 12}[to]
    for nbytes in range(100):
        path.write_bytes(data[:nbytes])
        with pytest.raises(NotAPackError if nbytes < magic_nbytes else TruncatedError):
            stream_pack.open(path)


@every_kind
def test_one_record_without_the_other_is_damage_and_never_executorchs_own(to: To, path: Path) -> None:
    for at, words in ((16384 - 1, "no locator"), (len(VECTORS[to]) - 1, "no footer")):
        changed = bytearray(VECTORS[to])
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=words) as caught:
            stream_pack.open(path)
        assert not isinstance(caught.value, RawPayloadError)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mps/linear_fp16.mp00", "mps"),
        ("xnnpack/linear_fp32.0.xh00", "xnnpack"),
        ("xnnpack/linear_fp32.0.inline.xh00", "xnnpack"),
        ("ptd/mlp_portable.ptd", "ptd"),
    ],
)
def test_what_executorch_wrote_is_no_pack_and_the_error_names_its_kind(name: str, kind: str) -> None:
    with pytest.raises(RawPayloadError, match=f"kind='{kind}'"):
        stream_pack.open(FOLDER / "executorch" / name)


@pytest.mark.parametrize(
    ("to", "wrong"),
    [
        # norm.bias: 6 bytes at offset 256
        ("xnnpack", (struct.pack("<QQ", 256, 6), struct.pack("<QQ", 256, 7))),
        ("xnnpack", (struct.pack("<QQ", 256, 6), struct.pack("<QQ", 255, 6))),
        ("ptd", (struct.pack("<QQ", 256, 6), struct.pack("<QQ", 256, 7))),
        ("ptd", (struct.pack("<QQ", 256, 6), struct.pack("<QQ", 255, 6))),
        ("ptd", (b"norm.bias", b"norm.biaz")),
    ],
)
def test_a_graph_that_contradicts_the_index_is_damage_though_all_checksums_agree(
    to: To, wrong: tuple[bytes, bytes], path: Path
) -> None:
    data = VECTORS[to]
    place = data.index(wrong[0])
    assert place < places(data).index
    changed = bytearray(data)
    changed[place : place + len(wrong[1])] = wrong[1]
    path.write_bytes(reseal(changed))
    stream_pack.open(path).close()
    (damage,) = verify(path).damages
    assert (damage.part, damage.tensors) == ("graph", ("norm.bias",))


@pytest.mark.parametrize("to", ["xnnpack", "ptd"])
def test_no_forged_graph_does_more_than_damage(to: To, path: Path) -> None:
    data = VECTORS[to]
    at = places(data)
    for place in range(at.index):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        path.write_bytes(reseal(changed, at))
        # The header may not lead to the locator any more.
        with may_refuse(NotAPackError):
            report = verify(path, jobs=1)
            # Bytes that align something inside a flatbuffer mean nothing.
            assert report.ok or {damage.part for damage in report.damages} <= {"graph", "head", "padding", "length"}


@pytest.mark.parametrize(("to", "place"), [("xnnpack", 30), ("xnnpack", 31), ("ptd", 48), ("ptd", 55)])
def test_padding_in_the_header_must_be_zero_though_all_checksums_agree(to: To, place: int, path: Path) -> None:
    changed = bytearray(VECTORS[to])
    changed[place] = 1
    path.write_bytes(reseal(changed))
    (damage,) = verify(path).damages
    assert (damage.part, damage.file_begin, damage.file_end) == ("padding", place, place + 1)


@pytest.mark.parametrize("to", ["xnnpack", "ptd"])
def test_padding_between_graph_and_index_must_be_zero(to: To, path: Path) -> None:
    # A graph that ends 32 bytes before the index, or more: three tensors more or fewer move its end.
    for count in range(1, 9):
        data = pack_bytes(path, {f"t{n}": torch.ones(1) for n in range(count)}, to=to)
        with stream_pack.open(path) as pack:
            end, index = pack._head.graph_end, pack._head.index_file_offset
        if end < index:
            break
    changed = bytearray(data)
    changed[index - 1] = 1
    path.write_bytes(reseal(changed))
    (damage,) = verify(path).damages
    assert (damage.part, damage.file_begin, damage.file_end) == ("padding", index - 1, index)


@every_kind
def test_a_pack_of_any_kind_is_a_source_from_a_pipe_too(to: To, path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, VECTORS[to])
    os.close(writing)
    try:
        stream_pack.convert(reading, path, to="ptd")
    finally:
        os.close(reading)
    assert path.read_bytes() == VECTORS["ptd"]


@every_kind
def test_what_a_name_or_dtype_makes_a_blob_is_whole_for_us(to: To, path: Path) -> None:
    content: dict[str, NDArray[np.generic]] = {
        "complex": np.array([1 + 2j, 3j], np.complex64),
        "": np.arange(3, dtype=np.uint16),
        "ünï\n": np.array(7.5),
    }
    stream_pack.save_file(content, path, to=to)
    with stream_pack.open(path, verify="full") as pack:
        for name, array in content.items():
            assert np.array_equal(pack[name].numpy(), array)


def test_a_name_that_executorch_would_cut_is_refused_before_a_byte_is_written(path: Path) -> None:
    with pytest.raises(stream_pack.SourceError, match="NUL"):
        stream_pack.save_file({"a\0b": np.zeros(1)}, path, to="ptd")
    assert not path.exists()


@pytest.mark.parametrize("to", ["MPS", "pte", None, 1, ["mps"]])
def test_a_kind_that_there_is_not_is_refused_by_every_entry(to: object, path: Path) -> None:
    for entry in (
        lambda: stream_pack.save_file({"a": np.zeros(1)}, path, to=to),  # type: ignore[arg-type]
        lambda: stream_pack.convert({"a": np.zeros(1)}, path, to=to),  # type: ignore[arg-type]
        lambda: stream_pack.forecast({"a": np.zeros(1)}, to=to),  # type: ignore[arg-type]
        lambda: stream_pack.Writer(path, {"a": ("float32", (1,))}, to=to),  # type: ignore[arg-type]
    ):
        with pytest.raises(stream_pack.OptionError, match="expected 'mps', 'xnnpack' or 'ptd'"):
            entry()
    assert not path.exists()


@every_kind
def test_a_writer_of_chunks_and_a_forecast_know_every_kind(to: To, path: Path) -> None:
    with stream_pack.Writer(path, {"a": ("float32", (2, 2)), "b": ("int8", (3,))}, to=to) as writer:
        writer.write("a", np.arange(4, dtype="<f4").tobytes())
        writer.write("b", b"abc")
    saved = path.with_name("saved")
    content = {"a": np.arange(4, dtype="<f4").reshape(2, 2), "b": np.frombuffer(b"abc", np.int8)}
    stream_pack.save_file(content, saved, to=to)
    assert path.read_bytes() == saved.read_bytes()
    assert stream_pack.forecast(content, to=to).target_nbytes == len(path.read_bytes())
