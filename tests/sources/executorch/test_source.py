"""Files that ExecuTorch wrote as sources: the suite of every source, and what only they do."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import stream_pack
from stream_pack import FormatError, LimitError, StreamPackError, StrictError, UnsupportedTensorError
from stream_pack.cli import main
from stream_pack.pipeline.spool import Spool
from stream_pack.reader.verify import verify
from stream_pack.sources.open import open_source
from tests.sources.byte_sources import Dribble
from tests.sources.source_suite import Expected, MakeSource, SourceSuite
from tests.support.et_files import Constant, Delegate, Named, mps_payload, program
from tests.support.spools import without_a_folder

VECTORS = Path(__file__).parent.parent.parent / "vectors" / "executorch"
PACKS = VECTORS / "programs" / "packs.pte"


def npz(path: Path, names: Callable[[str], str] = str) -> dict[str, Expected]:
    """What an archive holds, in the order of the archive."""
    with np.load(path) as file:
        return {
            names(name): Expected(file[name].dtype.name, file[name].shape, file[name].tobytes()) for name in file.files
        }


def named(case: str) -> dict[str, Expected]:
    """Named data as their payload describes them; bytes from the archive, the rest from the listing."""
    stored = npz(VECTORS / "xnnpack" / f"{case}.named.npz")
    meta = json.loads((VECTORS / "xnnpack" / f"{case}.meta.json").read_text())
    dtypes = {"xnn_datatype_fp32": "float32", "xnn_datatype_fp16": "float16", None: "float32"}
    expected = {}
    for constant in meta["delegates"][0]["constants"]:
        key = constant["named_key"]
        dims = tuple(constant["dims"])
        expected[key] = Expected(dtypes[constant.get("datatype")], dims, stored[key].data)
    return expected


class TestPayload(SourceSuite):
    """A raw MP00 payload in a file."""

    @pytest.fixture
    def make(self) -> MakeSource:
        return lambda: open_source(VECTORS / "mps" / "conv_bn_fp32.mp00")

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return npz(VECTORS / "mps" / "conv_bn_fp32.expected.npz", lambda name: name[2:])


class TestPayloadInPipe(TestPayload):
    chooses_order: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = (VECTORS / "mps" / "conv_bn_fp32.mp00").read_bytes()
        return lambda: open_source(Dribble(data, step=29))


class TestProgram(SourceSuite):
    """A .pte whose constants are named data."""

    @pytest.fixture
    def make(self) -> MakeSource:
        return lambda: open_source(VECTORS / "xnnpack" / "linear_fp16.pte")

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return named("linear_fp16")


class TestProgramInPipe(TestProgram):
    chooses_order: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = (VECTORS / "xnnpack" / "linear_fp16.pte").read_bytes()
        return lambda: open_source(Dribble(data, step=29))


class TestDataFileInPipe(SourceSuite):
    chooses_order: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = (VECTORS / "ptd" / "mlp_portable.ptd").read_bytes()
        return lambda: open_source(Dribble(data, step=29))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        # From its segments, which follow each other at multiples of 128 in the order of the names.
        data = (VECTORS / "ptd" / "mlp_portable.ptd").read_bytes()
        shapes = {"a.weight": (64, 32), "a.bias": (64,), "b.weight": (32, 64), "b.bias": (32,), "c.weight": (7, 32)}
        expected, at = {}, 640
        for name, shape in shapes.items():
            nbytes = 4 * int(np.prod(shape))
            expected[name] = Expected("float32", shape, data[at : at + nbytes])
            at += -(-nbytes // 128) * 128
        return expected


class TestPacksInside(SourceSuite):
    """A .pte whose payloads are packs."""

    @pytest.fixture
    def make(self) -> MakeSource:
        return lambda: open_source(PACKS)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        weights: dict[str, Any] = {
            "forward/0/layers.0.w": np.arange(24, dtype=np.float32).reshape(4, 6),
            "forward/0/layers.0.b": np.arange(6, dtype=np.float32),
            "forward/1/layers.0.w": np.arange(10, dtype=np.float16).reshape(2, 5),
        }
        return {n: Expected(a.dtype.name, a.shape, a.tobytes()) for n, a in weights.items()}


ALL = sorted(
    path
    for path in VECTORS.glob("*/*")
    if path.suffix in {".pte", ".ptd", ".mp00", ".xh00"} and not path.name.startswith("FAULT")
)


def pack_of(source: object, folder: Path) -> bytes:
    sink = io.BytesIO()
    stream_pack.convert(source, sink, spool_dir=folder)  # type: ignore[arg-type]
    return sink.getvalue()


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_pipe_gives_the_same_pack_as_the_file(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    from_file = pack_of(path, tmp_path)
    if data[8:12] != b"eh00" and path.suffix == ".pte":
        with pytest.raises(StreamPackError, match="does not say its length"):
            stream_pack.convert(Dribble(data, step=4096), io.BytesIO())
        return
    assert pack_of(Dribble(data, step=4096), tmp_path) == from_file


@pytest.mark.usefixtures("spools_on_disk")
def test_only_what_comes_out_of_order_goes_to_disk(tmp_path: Path) -> None:
    in_order = (VECTORS / "xnnpack" / "linear_fp16.pte").read_bytes()
    assert stream_pack.convert(Dribble(in_order, step=4096), io.BytesIO()).spool_nbytes == 0
    # The second payload stands behind the constants of the first.
    data = (VECTORS / "xnnpack" / "two_delegates_fp32.inline.pte").read_bytes()
    with without_a_folder(), pytest.raises(LimitError, match="--spool-dir"):
        stream_pack.convert(Dribble(data, step=4096), io.BytesIO())
    report = stream_pack.convert(Dribble(data, step=4096), io.BytesIO(), spool_dir=tmp_path)
    assert report.spool_nbytes == len(data)
    assert any("spooled on disk" in remark for remark in report.remarks)
    assert list(tmp_path.iterdir()) == []


def test_a_constant_that_contradicts_itself_is_refused_by_name_and_can_be_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = VECTORS / "mps" / "FAULT_views_int32.mp00"
    target = tmp_path / "pack"
    assert main(["convert", str(source), str(target)]) == 3
    assert "tensor '1' has 256 bytes; int32 of shape [2, 8] has 64" in capfd.readouterr().err
    assert not target.exists()
    with pytest.raises(UnsupportedTensorError) as caught:
        stream_pack.convert(source, target, exclude="1")
    assert caught.value.tensor == "5"
    with pytest.raises(UnsupportedTensorError):
        stream_pack.forecast(source, dtype="f16", include=["5"])
    stream_pack.convert(source, target, exclude=["1", "5"])
    with stream_pack.open(target) as pack, np.load(source.with_suffix(".expected.npz")) as expected:
        assert list(pack) == ["3"]
        assert np.array_equal(pack["3"].numpy(), expected["id3"])


def test_bytes_that_lie_once_in_the_file_lie_once_in_the_pack(tmp_path: Path) -> None:
    raw = mps_payload([Constant((4,), 0)], bytes(16))
    head = program(
        [Delegate(0)],
        [(0, len(raw)), (len(raw), 4096)],
        named=[Named("one", 1), Named("two", 1)],
        base=1024,
        segments_nbytes=len(raw) + 4096,
    )
    (tmp_path / "program").write_bytes(head + raw + bytes(range(256)) * 16)
    report = stream_pack.convert(tmp_path / "program", tmp_path / "pack")
    assert (report.tied, report.shared_nbytes, report.source_nbytes) == (1, 4096, 16 + 4096)
    with stream_pack.open(tmp_path / "pack") as pack:
        assert pack["one"].file_offset == pack["two"].file_offset
        assert pack["one"].raw() == bytes(range(256)) * 16


def test_notes_say_what_the_numbers_of_quantized_weights_are(tmp_path: Path) -> None:
    stream_pack.convert(VECTORS / "xnnpack" / "linear_dynamic_qcs8.pte", tmp_path / "pack")
    with stream_pack.open(tmp_path / "pack") as pack:
        notes = [pack.notes(name).get("xnnpack.datatype") for name in pack]
        quantized = [view.dtype for view in pack.values() if pack.notes(view.name)]
    assert notes.count("qcint8") == 3
    assert quantized == ["int8"] * 3


def test_the_report_says_what_was_left_out(tmp_path: Path) -> None:
    data = program(
        [Delegate(0, "VulkanBackend")], [(0, 40), (40, 8)], named=[Named("key", 1)], base=1024, segments_nbytes=48
    )
    (tmp_path / "program").write_bytes(data + b"VK00" * 12)
    report = stream_pack.convert(tmp_path / "program", tmp_path / "pack")
    assert report.tensors == 1
    assert any("'VulkanBackend'" in warning for warning in report.warnings)


@pytest.mark.parametrize(("name", "count"), [("xnnpack/linear_dynamic_qcs8.0.xh00", 8), ("ptd/mlp_xnnpack.pte", 5)])
def test_a_file_whose_constants_are_elsewhere_gives_an_empty_pack_and_says_so(
    name: str, count: int, tmp_path: Path
) -> None:
    # As a loop over the payloads of a program meets it.
    report = stream_pack.convert(VECTORS / name, tmp_path / "pack")
    assert report.tensors == 0
    with stream_pack.open(tmp_path / "pack") as pack:
        assert list(pack) == []
    assert f"{count} constants of the program are in other files" in report.warnings
    assert any("holds no constants: the pack is empty" in warning for warning in report.warnings)
    with pytest.raises(StrictError):
        stream_pack.convert(VECTORS / name, io.BytesIO(), strict=True)


def test_a_pack_that_lost_its_locator_is_no_raw_payload_in_a_pipe_either() -> None:
    sink = io.BytesIO()
    stream_pack.convert({"w": np.arange(6, dtype=np.float32)}, sink)
    data = bytearray(sink.getvalue())
    data[16384 - 1] ^= 1
    with pytest.raises(FormatError, match="footer"):
        stream_pack.convert(Dribble(bytes(data), step=4096), io.BytesIO())


def program_with_damaged_pack(place: int) -> bytes:
    """A program with a pack as payload, one byte of which is changed, and named data behind it."""
    sink = io.BytesIO()
    stream_pack.convert({"w": np.arange(6, dtype=np.float32)}, sink)
    pack = bytearray(sink.getvalue())
    pack[place] ^= 1
    segments = [(0, len(pack)), (len(pack), 8)]
    named = [Named("key", 1)]
    head = program([Delegate(0)], segments, named=named, base=4096, segments_nbytes=len(pack) + 8)
    return head + bytes(pack) + bytes(8)


@pytest.mark.parametrize("place", [5, 16384 - 1], ids=["magic", "locator"])
@pytest.mark.parametrize("step", [0, 1, 7, 4096], ids=["file", "pipe-1", "pipe-7", "pipe-4096"])
def test_a_pack_inside_a_program_that_lost_its_head_is_damage(place: int, step: int, tmp_path: Path) -> None:
    data = program_with_damaged_pack(place)
    (tmp_path / "program").write_bytes(data)
    source = Dribble(data, step=step) if step else tmp_path / "program"
    with pytest.raises(FormatError, match=r"footer|locator"):
        stream_pack.convert(source, io.BytesIO(), spool_dir=tmp_path)
    (damage,) = verify(tmp_path / "program").damages
    assert damage.file_begin == 4096


def test_a_pack_inside_a_file_converts_from_its_offset(tmp_path: Path) -> None:
    target = tmp_path / "pack"
    assert main(["convert", str(PACKS), str(target), "--offset", "16K", "--quiet"]) == 0
    data = PACKS.read_bytes()
    assert target.read_bytes() == data[16384 : 16384 + 32808]
    assert main(["convert", "-", str(target), "--offset", "16K"]) == 2


def test_damage_in_a_pack_inside_is_found_while_it_is_read(tmp_path: Path) -> None:
    data = bytearray(PACKS.read_bytes())
    with stream_pack.open(PACKS, offset=16384) as pack:
        data[16384 + pack["layers.0.w"].file_offset] ^= 1
    (tmp_path / "program").write_bytes(data)
    with pytest.raises(stream_pack.ChecksumError):
        stream_pack.convert(tmp_path / "program", io.BytesIO())


def test_a_program_on_a_descriptor_is_read_from_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before" + (VECTORS / "programs" / "mutable.pte").read_bytes())
    with path.open("rb") as file:
        file.seek(6)
        with open_source(file) as source:
            names = set(source.catalog.names)
    assert {"mutable/0/1", "mutable/0/2", "constant/1"} <= names


def test_closing_gives_the_disk_space_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    data = PACKS.read_bytes()
    source = open_source(Dribble(data, step=4096), spool=spool)
    source.close()
    assert spool.peak_nbytes == len(data)
    assert list(tmp_path.iterdir()) == []
