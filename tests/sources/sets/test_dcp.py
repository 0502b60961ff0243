"""torch.distributed checkpoints: written by two ranks under torchrun, every tensor equals the whole model's."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed_state

import stream_pack
from stream_pack.errors import (
    SourceChecksumError,
    SourceError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from stream_pack.pickles.nesting import flattening
from stream_pack.pipeline.budget import UNLIMITED
from stream_pack.sources.open import open_source
from stream_pack.sources.sets.dcp import DcpSource
from tests.sources.sets import save_distributed
from tests.sources.sets.expectations import expected_of, read, read_path
from tests.sources.source_suite import Expected, MakeSource, SourceSuite
from tests.support.damage import may_refuse
from tests.support.taking import taken

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of :func:`save_distributed.whole_model` and, beside it, what rank 0 saved with torch.save."""
    folder = tmp_path_factory.mktemp("dcp")
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", save_distributed.__name__, str(folder / "checkpoint"), str(folder / "whole.pt"),
    ]  # fmt: skip
    result = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def copy(two_ranks: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(two_ranks / "checkpoint", tmp_path / "copy"))


class TestTwoRanks(SourceSuite):
    @pytest.fixture
    def make(self, two_ranks: Path) -> MakeSource:
        return lambda: open_source(two_ranks / "checkpoint")

    @pytest.fixture
    def expected(self, two_ranks: Path) -> dict[str, Expected]:
        """The whole model, in the order of the metadata as torch itself reads it."""
        order = FileSystemReader(two_ranks / "checkpoint").read_metadata().state_dict_metadata
        whole = torch.load(two_ranks / "whole.pt")
        return expected_of({name: whole[name] for name in order if name in whole})

    def test_both_ranks_wrote_a_part(self, two_ranks: Path) -> None:
        names = {path.name for path in (two_ranks / "checkpoint").iterdir()}
        assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_what_was_read_and_what_was_left_out_is_in_the_report(two_ranks: Path, tmp_path: Path) -> None:
    report = stream_pack.convert(two_ranks / "checkpoint", tmp_path / "out.pack")
    whole = torch.load(two_ranks / "whole.pt")
    assert report.source_kind == "torch.distributed checkpoint"
    assert report.tensors == len(whole)
    assert report.source_nbytes == sum(tensor.nbytes for tensor in whole.values())
    assert report.verification == "CRC-32 of every record verified"
    # "step", and "config" with all that is in it
    assert report.remarks == ("skipped values that are not tensors: 2",)
    with stream_pack.open(tmp_path / "out.pack") as pack:
        assert all(torch.equal(pack[name].torch().view(torch.uint8), whole[name].contiguous().view(torch.uint8))
                   for name in whole if whole[name].ndim)  # fmt: skip


def test_by_name_the_pack_is_that_of_the_whole_model_byte_for_byte(two_ranks: Path, tmp_path: Path) -> None:
    stream_pack.convert(two_ranks / "checkpoint", tmp_path / "ranks.pack", order="name")
    stream_pack.convert(two_ranks / "whole.pt", tmp_path / "whole.pack", order="name")
    assert (tmp_path / "ranks.pack").read_bytes() == (tmp_path / "whole.pack").read_bytes()


def test_a_folder_without_its_metadata_was_not_finished(copy: Path) -> None:
    (copy / ".metadata").unlink()
    with pytest.raises(UnsupportedCheckpointError, match="the save did not finish"):
        open_source(copy)


def test_a_shard_that_is_missing_or_cut_short_is_named_before_a_byte_is_written(copy: Path) -> None:
    shard = copy / "__1_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(TruncatedSourceError, match=r"__1_0\.distcp' has .* cut short") as caught:
        open_source(copy)
    assert caught.value.missing_nbytes == 1
    shard.unlink()
    with pytest.raises(UnsupportedCheckpointError, match=r"'__1_0\.distcp', which does not exist"):
        open_source(copy)


def test_damage_names_the_file_and_the_tensor(copy: Path, tmp_path: Path) -> None:
    shard = copy / "__1_0.distcp"
    whole = save_distributed.whole_model()
    data = bytearray(shard.read_bytes())
    data[data.index(whole["uneven_rows"][4:].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SourceChecksumError, match=r"^'__1_0\.distcp', .*'uneven_rows' at \[4, 0\]"):
        stream_pack.convert(copy, tmp_path / "out.pack")
    assert not (tmp_path / "out.pack").exists()


# -- one process, so that many checkpoints can be made


def save(state: Mapping[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        save_distributed_state(dict(state), storage_writer=FileSystemWriter(folder, **options), no_dist=True)
    return folder


def metadata_of(folder: Path) -> Metadata:
    value = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(value, Metadata)
    return value


def rewrite(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


MODEL = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0)}


def test_the_model_is_taken_out_of_a_training_checkpoint_and_it_is_said(tmp_path: Path) -> None:
    optimizer = {"exp_avg": torch.ones(3, 4), "lr": 0.1}
    save({"model": MODEL, "optimizer": optimizer, "step": 3}, tmp_path)
    expected = {name: tensor.data for name, tensor in expected_of(MODEL).items()}
    with open_source(tmp_path) as source:
        # "step" and "optimizer.lr" are not among what was taken.
        assert source.traits.remarks == ("using the tensors under 'model'; skipped those under 'optimizer'",)
    assert read_path(tmp_path) == expected
    assert read(DcpSource(tmp_path, flatten=flattening("model"), watch=UNLIMITED)) == expected
    assert read(DcpSource(tmp_path, flatten=flattening("optimizer"), watch=UNLIMITED)) == {
        "exp_avg": torch.ones(3, 4).numpy().tobytes()
    }
    everything = read(DcpSource(tmp_path, flatten=flattening("."), watch=UNLIMITED))
    assert set(everything) == {"model.w", "model.b", "optimizer.exp_avg"}
    with pytest.raises(UnsupportedCheckpointError, match="'ema'"):
        DcpSource(tmp_path, flatten=flattening("ema"), watch=UNLIMITED)


def test_shards_that_the_metadata_does_not_name_are_mentioned(tmp_path: Path) -> None:
    folder = save({**MODEL, "epoch": 3}, tmp_path / "ckpt")
    with open_source(folder) as source:
        assert not any("does not name" in line for line in source.traits.warnings)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    with open_source(folder) as source:
        assert "shards that .metadata does not name were left out, 1 in all" in source.traits.warnings[-1]
        assert "'__1_0.distcp'" in source.traits.warnings[-1]


@pytest.mark.parametrize("keys", [("model", "state_dict"), ("generator", "discriminator"), ("optimizer",)])
def test_several_state_dicts_are_never_guessed_between(tmp_path: Path, keys: tuple[str, ...]) -> None:
    save(dict.fromkeys(keys, MODEL), tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="nested below|several") as caught:
        open_source(tmp_path)
    assert all(repr(key) in str(caught.value) for key in keys)


def test_a_tensor_beside_a_nested_dict_is_not_dropped_silently(tmp_path: Path) -> None:
    save({"model": MODEL, "extra": torch.ones(1)}, tmp_path)
    with open_source(tmp_path) as source:
        assert source.traits.remarks == ("using the tensors under 'model'; skipped those under 'extra'",)


def test_safetensors_inside_the_shards_are_refused(tmp_path: Path) -> None:
    save(MODEL, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(SourceError, match="but a safetensors file; a checkpoint saved in another format"):
        open_source(tmp_path)


def test_a_folder_of_dcp_for_hugging_face_is_refused(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_distributed_state(dict(MODEL), storage_writer=writer, no_dist=True)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if path.is_dir() or path.suffix == ".safetensors":
            with pytest.raises(UnsupportedCheckpointError, match="consolidate_safetensors_files"):
                stream_pack.forecast(path)


def two_places(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata["w"].chunks[0]  # type: ignore[union-attr]
    metadata.state_dict_metadata["w"].chunks.append(chunk)  # type: ignore[union-attr]


def twice_the_same_place(metadata: Metadata) -> None:
    index = MetadataIndex("w", (9, 9))
    metadata.storage_data[index] = place_of(metadata, "w")
    object.__setattr__(index, "offset", torch.Size([0, 0]))


def grown(metadata: Metadata) -> None:
    w_of(metadata).size = torch.Size([3000, 4000])
    chunked(metadata, 3000, 4000)


def swapped_paths(metadata: Metadata) -> None:
    metadata.planner_data = {"w": ("x",), "b": ("x", "y")}


def w_of(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def place_of(metadata: Metadata, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def moved(metadata: Metadata, *offsets: int) -> None:
    """The chunk of w, said to lie elsewhere in it."""
    w_of(metadata).chunks[0].offsets = torch.Size(offsets)
    info = place_of(metadata, "w")
    metadata.storage_data = {
        MetadataIndex("w", offsets) if index.fqn == "w" else index: value
        for index, value in metadata.storage_data.items()
    }
    assert place_of(metadata, "w") is info


def chunked(metadata: Metadata, *sizes: int) -> None:
    w_of(metadata).chunks[0].sizes = torch.Size(sizes)


def swap_places(metadata: Metadata) -> None:
    w, b = place_of(metadata, "w"), place_of(metadata, "b")
    w.offset, w.length, b.offset, b.length = b.offset, b.length, w.offset, w.length


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (two_places, "they hold 24 elements, it has 12"),
        (twice_the_same_place, "two places for the chunk of 'w'"),
        (lambda m: setattr(w_of(m), "size", torch.Size([0, 4])), r"'w' of shape \[0, 4\] has no elements, and lists 1"),
        (swapped_paths, "'b' was saved where another value was"),
        (lambda m: w_of(m).chunks.clear(), "they hold 0 elements, it has 12"),
        (lambda m: chunked(m, 2, 4), "they hold 8 elements, it has 12"),
        (lambda m: chunked(m, 4, 3), "is outside"),
        (lambda m: chunked(m, 12), "is outside"),
        (lambda m: moved(m, 1, 0), "is outside"),
        (lambda m: w_of(m).chunks.append(chunk((9, 9), (1, 1))), r"the chunk of tensor 'w' at \[9, 9\]"),
        (lambda m: m.storage_data.clear(), "no place is given for the chunk"),
        (lambda m: setattr(w_of(m), "size", torch.Size([3, 5])), "they hold 12 elements, it has 15"),
        (grown, r"at \[0, 0\] has 48000000 bytes, and .metadata says that its archive"),
        (lambda m: setattr(w_of(m), "size", [3, 4]), "is not made of whole numbers"),
        (lambda m: setattr(w_of(m), "size", (-3, -4)), "is not made of whole numbers"),
        (lambda m: setattr(w_of(m), "size", (2**70,)), "is not made of whole numbers"),
        (lambda m: setattr(w_of(m), "size", (2**62,) * 64), "is outside|they hold"),
        (lambda m: setattr(w_of(m), "chunks", None), "no list of chunks"),
        (lambda m: setattr(w_of(m), "properties", None), "no TensorProperties"),
        (lambda m: setattr(place_of(m, "w"), "offset", -1), "is not made of whole numbers"),
        (lambda m: setattr(place_of(m, "w"), "relative_path", "../__0_0.distcp"), "plain name of a file"),
        (lambda m: setattr(place_of(m, "w"), "relative_path", "/etc/passwd"), "plain name of a file"),
        (lambda m: setattr(place_of(m, "w"), "relative_path", 3), "not text"),
        (lambda m: setattr(place_of(m, "w"), "transform_descriptors", ["zstd"]), "were transformed"),
        (lambda m: setattr(m, "storage_data", None), "no storage_data"),
        (lambda m: setattr(m, "state_dict_metadata", []), "no state_dict_metadata"),
        (lambda m: m.state_dict_metadata.update({"w": 5}), "a int where a TensorStorageMetadata"),
        (lambda m: m.state_dict_metadata.update({5: w_of(m)}), "whose name is not text"),
    ],
)  # fmt: skip
def test_metadata_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Callable[[Metadata], object], why: str
) -> None:
    save(MODEL, tmp_path)
    metadata = metadata_of(tmp_path)
    change(metadata)
    rewrite(tmp_path, metadata)
    with pytest.raises(UnsupportedCheckpointError, match=why):
        taken(open_source(tmp_path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swap_places, r"'w' at \[0, 0\]: it is float32 of shape \[3\], and .metadata says float32 of shape \[3, 4\]"),
        (lambda m: setattr(w_of(m).properties, "dtype", torch.int32), "it is float32 of shape .* says int32"),
        (lambda m: setattr(place_of(m, "w"), "length", place_of(m, "w").length - 1), "'w' at"),
        (lambda m: setattr(place_of(m, "b"), "length", place_of(m, "b").length - 1), "'b' at"),
        (lambda m: setattr(place_of(m, "w"), "offset", 1), "no archive of torch.save at byte 1"),
    ],
)  # fmt: skip
def test_chunks_that_are_not_what_the_metadata_says_are_refused(
    tmp_path: Path, change: Callable[[Metadata], object], why: str
) -> None:
    folder = save(MODEL, tmp_path / "ckpt")
    metadata = metadata_of(folder)
    change(metadata)
    rewrite(folder, metadata)
    with pytest.raises(SourceError, match=why):
        stream_pack.convert(folder, tmp_path / "out.pack")
    assert not (tmp_path / "out.pack").exists()


def test_a_dtype_that_no_pack_holds_is_refused_by_name(tmp_path: Path) -> None:
    save(MODEL, tmp_path)
    metadata = metadata_of(tmp_path)
    w_of(metadata).properties.dtype = torch.quint8
    rewrite(tmp_path, metadata)
    with pytest.raises(UnsupportedTensorError, match="'w' is of dtype 'torch.quint8'"):
        taken(open_source(tmp_path))


def test_two_chunks_along_two_dims_are_put_together(tmp_path: Path) -> None:
    """As a mesh of 2 x 2 would have saved them: the chunks of one save, joined to one tensor on paper."""
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    quarters = {(0, 0): whole[:3, :4], (0, 4): whole[:3, 4:], (3, 0): whole[3:, :4], (3, 4): whole[3:, 4:]}
    save({str(at): part.clone() for at, part in quarters.items()}, tmp_path)
    metadata = metadata_of(tmp_path)
    first = metadata.state_dict_metadata[str((0, 0))]
    assert isinstance(first, TensorStorageMetadata)
    chunks = [ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in reversed(quarters.items())]
    entry = TensorStorageMetadata(first.properties, whole.shape, chunks)
    data = {MetadataIndex("w", at): place_of(metadata, str(at)) for at in quarters}
    rewrite(tmp_path, replace(metadata, state_dict_metadata={"w": entry}, storage_data=data, planner_data=None))
    assert read_path(tmp_path) == {"w": whole.numpy().tobytes()}


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_nothing_that_the_metadata_names_is_run_or_imported(tmp_path: Path) -> None:
    save(MODEL, tmp_path)
    metadata = metadata_of(tmp_path)
    marker = tmp_path / "marker"
    metadata.planner_data = Evil(marker)
    rewrite(tmp_path, metadata)
    expected = {name: tensor.data for name, tensor in expected_of(MODEL).items()}
    assert read_path(tmp_path) == expected  # what is not needed is never looked at
    metadata.state_dict_metadata = Evil(marker)  # type: ignore[assignment]
    rewrite(tmp_path, metadata)
    with pytest.raises(UnsupportedCheckpointError):
        open_source(tmp_path)
    assert not marker.exists()


def test_bytes_behind_the_metadata_are_refused(tmp_path: Path) -> None:
    save(MODEL, tmp_path)
    with open(tmp_path / ".metadata", "ab") as file:
        file.write(b".")
    with pytest.raises(UnsupportedCheckpointError, match="bytes follow its end"):
        open_source(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save({"w": MODEL["w"]}, tmp_path_factory.mktemp("small"))


def outcome(folder: Path) -> dict[str, bytes] | None:
    """What is read; None if it is refused."""
    with may_refuse(TruncatedSourceError, UnsupportedCheckpointError, UnsupportedTensorError):
        return read_path(folder)
    return None


def test_metadata_cut_at_any_byte_is_refused(small: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "copy"))
    data = (small / ".metadata").read_bytes()
    for nbytes in range(len(data)):
        (folder / ".metadata").write_bytes(data[:nbytes])
        assert outcome(folder) is None, nbytes


def test_a_flipped_bit_in_the_metadata_never_gives_another_error_or_wrong_shape(small: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "copy"))
    data = (small / ".metadata").read_bytes()
    values = {MODEL["w"].numpy().tobytes()}
    for at in range(len(data)):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            (folder / ".metadata").write_bytes(changed)
            result = outcome(folder)
            assert result is None or set(result.values()) <= values, at


@given(st.binary(max_size=200))
def test_any_bytes_as_metadata_are_an_error_of_ours(small: Path, data: bytes) -> None:
    folder = small.parent / "any"
    if not folder.exists():
        shutil.copytree(small, folder)
    (folder / ".metadata").write_bytes(b"\x80\x04" + data)
    assert outcome(folder) is None


def megatron(tmp_path: Path, tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint as Megatron's strategy leaves it: a class of its own that adds one field to torch's metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_distributed_state(tensors, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    code = """
import dataclasses, pickle, sys, types
from torch.distributed.checkpoint.metadata import Metadata

name = "megatron.core.dist_checkpointing.strategies.torch"
parts = name.split(".")
for n in range(1, len(parts) + 1):
    sys.modules[".".join(parts[:n])] = types.ModuleType("stand-in")

@dataclasses.dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict = None

MCoreMetadata.__module__ = name
sys.modules[name].MCoreMetadata = MCoreMetadata
path, shapes = sys.argv[1], eval(sys.argv[2])
with open(path, "rb") as file:
    old = pickle.load(file)
data = {key: {} for key in old.state_dict_metadata}
data.update({key: {"nd_reformulated_orig_global_shape": shape} for key, shape in shapes.items()})
with open(path, "wb") as file:
    pickle.dump(MCoreMetadata(**vars(old), mcore_data=data), file)
"""
    metadata = tmp_path / "checkpoint" / ".metadata"
    subprocess.run([sys.executable, "-c", code, metadata, repr(shapes)], check=True)
    return tmp_path / "checkpoint"


def test_metadata_of_megatron_are_read_without_megatron(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(2, 6)
    folder = megatron(tmp_path, {"decoder.w": weight}, {})
    report = stream_pack.convert(folder, tmp_path / "out.pack")
    assert report.warnings == ()
    assert torch.equal(stream_pack.load_file(tmp_path / "out.pack")["decoder.w"], weight)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2), (4, 4), (1, 1)])
def test_a_tensor_that_megatron_stored_by_flattened_shards_has_its_own_shape_and_order(
    grid: tuple[int, int], tmp_path: Path
) -> None:
    whole = torch.arange(32.0).reshape(4, 8)
    rows, columns = 4 // grid[0], 8 // grid[1]
    shards = [
        whole[x * rows : (x + 1) * rows, y * columns : (y + 1) * columns].reshape(-1)
        for x in range(grid[0])
        for y in range(grid[1])
    ]
    stored = torch.stack(shards).reshape(*grid, rows * columns)
    folder = megatron(tmp_path, {"exp_avg.w": stored, "plain": whole}, {"exp_avg.w": (4, 8)})
    for to in (tmp_path / "out.pack", io.BytesIO()):
        report = stream_pack.convert(folder, to)
        assert report.tensors == 2
        if isinstance(to, io.BytesIO):
            (tmp_path / "out.pack").write_bytes(to.getvalue())
        found = stream_pack.load_file(tmp_path / "out.pack")
        assert torch.equal(found["exp_avg.w"], whole)
        assert torch.equal(found["plain"], whole)


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (4, 8, 1), (0, 8), "4x8"])
def test_a_tensor_whose_own_shape_cannot_be_is_left_out_by_name(shape: Any, tmp_path: Path) -> None:
    stored = torch.arange(32.0).reshape(1, 2, 16)
    folder = megatron(tmp_path, {"exp_avg.w": stored, "plain": torch.ones(2)}, {"exp_avg.w": shape})
    report = stream_pack.convert(folder, tmp_path / "out.pack")
    assert report.tensors == 1
    (warning,) = report.warnings
    assert "the original shape cannot be restored: 'exp_avg.w'" in warning
