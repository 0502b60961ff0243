"""A source seen through a selection and a cast is a source like any other, from a file and from a pipe."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack.errors import LimitError, SourceChecksumError, SourceError
from stream_pack.format.dtypes import BY_NAME
from stream_pack.pipeline.adapt.cast_rules import cast_rules
from stream_pack.pipeline.adapt.select import Rename, Selection
from stream_pack.pipeline.adapt.source import Adaptation, adapted
from stream_pack.pipeline.chunks import Zeros
from stream_pack.pipeline.places import NOWHERE
from stream_pack.sources.memory.source import LiveSource
from stream_pack.sources.safetensors import SafetensorsSource
from stream_pack.sources.torch_save.zip import TorchZipSource
from tests.sources.byte_sources import Dribble, file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, collect, options, requests_for
from tests.support.spools import without_a_folder
from tests.support.torch_zips import saved
from tests.writer.test_pack import ScriptedSource

ADAPTATION = Adaptation(
    Selection(
        exclude=("optimizer.*",), renames=(Rename.parse(r"s/^module\.//"), Rename.parse("s/_/./g")), order="name"
    ),
    cast_rules({"*norm*": "f64", "*keep": "f32", "*": "bf16"}),
)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(70, 9, generator=generator)
    return {
        "module.w": w,
        "module.tied": w,
        "module.rows": w[64:],
        "module.t": torch.randn(5, 7, generator=generator).double().t(),
        "module.norm_1": torch.randn(33, generator=generator).half(),
        "module.keep": torch.randn(3, generator=generator),
        "module.ids": torch.arange(5),
        "module.mask": torch.tensor([True, False]),
        "module.f8": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
        "module.c": torch.randn(2, generator=generator).to(torch.complex64),
        "module.scalar": torch.tensor(2.5, dtype=torch.float64),
        "module.empty": torch.empty(0, 4, dtype=torch.float16),
        "optimizer.w": torch.randn(70, 9, generator=generator),
    }


def wanted() -> dict[str, torch.Tensor]:
    """The same, as torch would do it."""
    given = tensors()
    del given["optimizer.w"]
    cast = {
        name.removeprefix("module.").replace("_", "."): tensor.to(
            torch.float64 if "norm" in name else torch.float32 if "keep" in name else torch.bfloat16
        )
        if tensor.dtype in (torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)
        else tensor
        for name, tensor in given.items()
    }
    return dict(sorted(cast.items()))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected_of(given: dict[str, torch.Tensor]) -> dict[str, Expected]:
    return {
        name: Expected(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), as_bytes(tensor))
        for name, tensor in given.items()
    }


class TestTensorsInMemory(SourceSuite):
    @pytest.fixture
    def make(self) -> MakeSource:
        return lambda: adapted(LiveSource(tensors()), ADAPTATION)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(wanted())


class TestATorchFile(TestTensorsInMemory):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        data = saved(tensors())
        return lambda: adapted(TorchZipSource(file_stream(data, tmp_path)), ADAPTATION)


class TestATorchPipe(TestTensorsInMemory):
    chooses_order: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = saved(tensors())
        return lambda: adapted(TorchZipSource(pipe_stream(data, step=1)), ADAPTATION)


class TestASafetensorsPipe(TestTensorsInMemory):
    chooses_order: ClassVar[bool] = False

    @pytest.fixture
    def make(self) -> MakeSource:
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in apart().items()})
        return lambda: adapted(SafetensorsSource(pipe_stream(data, step=1)), ADAPTATION)


def apart() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors().items()}


def test_file_pipe_and_memory_give_the_same_pack_whatever_the_chunks(tmp_path: Path) -> None:
    data = saved(tensors())
    (tmp_path / "model.pt").write_bytes(data)
    packs = []
    for source in (tmp_path / "model.pt", Dribble(data, step=1000), tensors()):
        for chunk_nbytes in (7, 1 << 20):
            if isinstance(source, Dribble):
                source.taken = 0
            stream_pack.convert(
                source,
                tmp_path / "pack",
                exclude="optimizer.*",
                rename=[r"s/^module\.//", "s/_/./g"],
                dtype={"*norm*": "f64", "*keep": torch.float32, "*": "bf16"},
                order="name",
                chunk_nbytes=chunk_nbytes,
            )
            packs.append((tmp_path / "pack").read_bytes())
    assert len(set(packs)) == 1
    with stream_pack.open(tmp_path / "pack") as pack:
        pack.verify()
        assert list(pack) == list(wanted())
        for name, tensor in wanted().items():
            assert pack[name].dtype == str(tensor.dtype).removeprefix("torch.")
            assert pack[name].shape == tuple(tensor.shape)
            assert bytes(pack[name].raw()) == as_bytes(tensor), name


def test_cast_tied_tensors_share_bytes_and_the_report_adds_up(tmp_path: Path) -> None:
    report = stream_pack.convert(saved_file(tmp_path), tmp_path / "pack", dtype="bf16")
    with stream_pack.open(tmp_path / "pack") as pack:
        assert pack["module.w"].file_offset == pack["module.tied"].file_offset
    assert report.casts == {"float16 -> bfloat16": 2, "float32 -> bfloat16": 5, "float64 -> bfloat16": 2}
    # rows of w begin at byte 64 * 9 * 2 = 1152 of it, which is no multiple of 256: stored apart.
    assert report.repeated_nbytes == 6 * 9 * 4
    assert report.target_nbytes == (
        report.source_nbytes
        - report.unused_nbytes
        + report.repeated_nbytes
        + report.cast_nbytes
        + report.padding_nbytes
        + report.overhead_nbytes
    )
    assert report.cast_nbytes == -(2 * 70 * 9 * 2 + 6 * 9 * 2 + 35 * 6 + 3 * 2 + 6)
    assert "5 float32 -> bfloat16" in report.summary()


def saved_file(folder: Path) -> Path:
    path = folder / "model.pt"
    torch.save(tensors(), path)
    return path


def test_save_file_casts_too(tmp_path: Path) -> None:
    w = torch.randn(100)
    stream_pack.save_file({"w": w}, tmp_path / "pack", dtype=torch.float16)
    assert torch.equal(stream_pack.load_file(tmp_path / "pack")["w"], w.half())


def test_nothing_to_adapt_is_the_source_itself() -> None:
    source = LiveSource(tensors())
    assert adapted(source, Adaptation()) is source


def test_what_is_left_out_of_a_pipe_is_verified_all_the_same() -> None:
    data = bytearray(saved({"taken": torch.arange(9.0), "left out": torch.arange(1000.0)}))
    data[data.index(torch.arange(990.0, 999.0).numpy().tobytes())] ^= 1
    source = adapted(TorchZipSource(pipe_stream(bytes(data), step=4096)), Adaptation(Selection(include=("taken",))))
    _, requests = requests_for(source.catalog)
    with pytest.raises(SourceChecksumError):
        collect(source, requests, options())


def test_what_is_left_out_counts_as_unused(tmp_path: Path) -> None:
    given = {"a": torch.arange(100.0), "b": torch.arange(50.0)}
    report = stream_pack.convert(given, tmp_path / "pack", include="a")
    assert (report.tensors, report.unused_nbytes) == (1, 200)


class Sparse(ScriptedSource):
    """One tensor of 2**40 float32: a 1.0 in two pieces, then a hole."""

    def __init__(self) -> None:
        hole = Zeros((1 << 42) - 4)
        super().__init__({"w": 1 << 42}, [(0, b"\0\0\x80"), (0, b"\x3f"), (0, hole)])
        self.catalog.dtypes[:] = BY_NAME["float32"]
        self.catalog.dims.values[:] = 1 << 40


def test_a_hole_is_cast_to_a_hole() -> None:
    half = adapted(Sparse(), Adaptation(casts=cast_rules("f16")))
    assert half.traits.sparse
    _, requests = requests_for(half.catalog)
    (_, one), (_, hole) = half.stream(requests, options())
    assert bytes(one) == b"\0\x3c"  # type: ignore[arg-type]
    assert hole == Zeros((1 << 41) - 2)


def test_a_refusal_closes_the_source_and_leaves_the_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "pack"
    target.write_text("before")
    with pytest.raises(SourceError, match="no tensor is selected"):
        stream_pack.convert(tensors(), target, include=["nothing"])
    with pytest.raises(LimitError, match="at least"):
        stream_pack.convert(tensors(), target, max_memory=1)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


@pytest.mark.usefixtures("spools_on_disk")
def test_sorting_a_pipe_into_a_stream_needs_a_spool_and_says_so_before_the_first_byte(tmp_path: Path) -> None:
    given = {"b": torch.arange(1000.0), "a": torch.arange(10.0)}
    out = io.BytesIO()
    with without_a_folder(), pytest.raises(LimitError, match="4000 bytes"):
        stream_pack.convert(Dribble(saved(given), step=1000), out, order="name")
    assert out.getvalue() == b""
    report = stream_pack.convert(Dribble(saved(given), step=1000), out, order="name", spool_dir=tmp_path)
    assert report.spool_nbytes == 4000
    stream_pack.convert(given, tmp_path / "pack", order="name")
    assert out.getvalue() == (tmp_path / "pack").read_bytes()


def test_rules_for_dtypes_match_the_names_that_the_source_has() -> None:
    renames = (Rename.parse("s/old/new/"),)
    adaptation = Adaptation(Selection(renames=renames), cast_rules({"new": "f64", "old": "f16"}))
    source = adapted(LiveSource({"old": torch.ones(2)}), adaptation)
    assert source.catalog.names == ("new",)
    assert source.catalog.nbytes.tolist() == [4]


def test_what_is_left_out_needs_no_spool(tmp_path: Path) -> None:
    pipe = Dribble(saved({"w": torch.arange(6.0), "t": torch.arange(6.0).reshape(2, 3).t()}), step=99)
    out = io.BytesIO()
    report = stream_pack.convert(pipe, out, exclude="t", dtype="f16")
    assert report.spool_nbytes == 0
    stream_pack.convert({"w": torch.arange(6.0).half()}, tmp_path / "pack")
    assert out.getvalue() == (tmp_path / "pack").read_bytes()


def test_what_is_cast_has_no_place_and_the_rest_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(100), "ids": torch.arange(4)}, path)
    source = SafetensorsSource(file_stream(path.read_bytes(), tmp_path))
    with adapted(source, Adaptation(Selection(), cast_rules("bf16"))) as cast:
        kept, requests = requests_for(cast.catalog)
        offsets = dict(zip((cast.catalog.names[k] for k in kept), cast.places(requests).offsets.tolist()))
    assert offsets["w"] == NOWHERE
    assert path.read_bytes()[offsets["ids"] :][:32] == bytes(torch.arange(4).view(torch.uint8).numpy())
