"""Hugging Face checkpoints in shards: against the safetensors package and torch."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack.errors import SourceChecksumError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.open import open_source
from tests.sources.sets.expectations import expected_of, read_path
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, collect, options, requests_for

SHARDS = ("model-00001-of-00002", "model-00002-of-00002")


def shards() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "embed": torch.randn(10, 4, generator=generator).to(torch.bfloat16),
            "layers.0.w": torch.randn(4, 4, generator=generator),
            "empty": torch.empty(0, 3),
        },
        {
            "layers.1.w": torch.randn(3, 5, generator=generator),
            "scalar": torch.tensor(2.5),
            "head": torch.randn(4, 10, generator=generator).half(),
        },
    ]


def write_index(path: Path, weight_map: Mapping[str, object], **more: object) -> Path:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map, **more}
    path.write_text(json.dumps(index))
    return path


def write_safetensors(folder: Path, **left_out: None) -> Path:
    """Two shards and their index; its map is sorted by name, as transformers writes it."""
    weight_map = {}
    for stem, tensors in zip(SHARDS, shards()):
        name = f"{stem}.safetensors"
        safetensors.torch.save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update({tensor: name for tensor in tensors if tensor not in left_out})
    return write_index(folder / "model.safetensors.index.json", dict(sorted(weight_map.items())))


def write_bin(folder: Path) -> Path:
    weight_map = {}
    for stem, tensors in zip(SHARDS, bin_shards()):
        torch.save(tensors, folder / f"{stem}.bin")
        weight_map.update(dict.fromkeys(tensors, f"{stem}.bin"))
    return write_index(folder / "pytorch_model.bin.index.json", weight_map)


def bin_shards() -> list[dict[str, torch.Tensor]]:
    """With what only torch.save knows: a tied tensor and one that is not contiguous."""
    first, second = shards()
    return [first | {"tied": first["embed"]}, second | {"turned": second["head"].t()}]


class TestSafetensorsShards(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        index = write_safetensors(tmp_path)
        return lambda: open_source(index)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        tensors = {name: tensor for shard in shards() for name, tensor in shard.items()}
        # The shards in the order of their names, each in the order that the safetensors package gave its data:
        # by falling alignment of the dtype, then by name.  (So "empty", the first float, begins where others do.)
        order = ["empty", "layers.0.w", "embed", "layers.1.w", "scalar", "head"]
        return expected_of({name: tensors[name] for name in order})


class TestBinShards(SourceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        index = write_bin(tmp_path)
        return lambda: open_source(index)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of({n: tensor for shard in bin_shards() for n, tensor in shard.items()})


@pytest.mark.parametrize("jobs", [1, 4])
def test_buffers_of_both_shards_in_turn_come_in_the_order_asked_for(tmp_path: Path, jobs: int) -> None:
    for index in (write_safetensors(tmp_path), write_bin(tmp_path)):
        with open_source(index) as source:
            names = source.catalog.names
            half = len(names) // 2
            mixed = [k for pair in zip(range(half), range(half, len(names))) for k in pair]
            tensors, requests = requests_for(source.catalog, mixed)
            wanted = options(chunk_nbytes=16, jobs=jobs, in_order=True, spool=Spool("nowhere"))
            pieces = [(buffer, bytes(chunk)) for buffer, chunk in source.stream(requests, wanted)]  # type: ignore[arg-type]
        buffers = [buffer for buffer, _ in pieces]
        assert buffers == sorted(buffers)
        everything = {n: t for shard in bin_shards() for n, t in shard.items()}
        expected = expected_of(everything)
        for number, k in enumerate(tensors):
            data = b"".join(chunk for buffer, chunk in pieces if buffer == number)
            assert data == expected[names[k]].data


def test_a_folder_with_an_index_and_the_index_itself_are_the_same(tmp_path: Path) -> None:
    index = write_safetensors(tmp_path)
    targets = [tmp_path / "a.pack", tmp_path / "b.pack", tmp_path / "c.pack"]
    stream_pack.convert(index, targets[0])
    report = stream_pack.convert(tmp_path, targets[1])
    with open(targets[2], "wb", buffering=0) as out:
        stream_pack.convert(tmp_path, out)
    assert targets[0].read_bytes() == targets[1].read_bytes() == targets[2].read_bytes()
    assert report.source_kind == "Hugging Face set of 2 files"
    assert report.verification == "the source carries no checksum"
    assert report.warnings == ()
    with stream_pack.open(targets[0]) as pack:
        assert pack.metadata == {"format": "pt"}
        for name, tensor in {n: t for shard in shards() for n, t in shard.items()}.items():
            assert torch.equal(pack[name].torch(), tensor)


def test_a_set_may_have_one_file(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "1.safetensors")
    write_index(tmp_path / "m.index.json", {"w": "1.safetensors"})
    assert stream_pack.convert(tmp_path, tmp_path / "out.pack").source_kind == "Hugging Face set of 1 file"
    index = write_index(tmp_path / "m.index.json", {"w": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(UnsupportedCheckpointError, match="lists 1 tensor missing from '1.safetensors': 'b'"):
        stream_pack.convert(index, tmp_path / "out.pack")


def test_tied_tensors_of_a_shard_stay_tied(tmp_path: Path) -> None:
    report = stream_pack.convert(write_bin(tmp_path), tmp_path / "out.pack")
    assert report.tied == 1
    assert report.verification == "CRC-32 of every record verified"


def test_tensors_that_the_index_does_not_name_are_left_out_and_counted(tmp_path: Path) -> None:
    index = write_safetensors(tmp_path, head=None, empty=None)
    report = stream_pack.convert(index, tmp_path / "out.pack")
    (warning,) = report.warnings
    assert warning == (
        "tensors that 'model.safetensors.index.json' does not name were left out, 2 in all: 'empty', 'head'"
    )
    with stream_pack.open(tmp_path / "out.pack") as pack:
        assert set(pack) == {"embed", "layers.0.w", "layers.1.w", "scalar"}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_name_in_two_files_is_taken_from_the_one_that_the_index_says(tmp_path: Path, suffix: str) -> None:
    save = torch.save if suffix == "bin" else safetensors.torch.save_file
    save({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(1)}, tmp_path / f"base.{suffix}")
    save({"a": torch.full((2,), 9.0)}, tmp_path / f"overlay.{suffix}")
    weight_map = {"a": f"overlay.{suffix}", "b": f"base.{suffix}"}
    report = stream_pack.convert(write_index(tmp_path / "m.index.json", weight_map), tmp_path / "out.pack")
    assert report.warnings == (
        f"'a' is also in 'base.{suffix}'; taken from 'overlay.{suffix}', as the index says",
        "tensors that 'm.index.json' does not name were left out, 1 in all: 'c'",
    )
    with stream_pack.open(tmp_path / "out.pack") as pack:
        assert pack["a"].numpy().tolist() == [9.0, 9.0]
        assert pack["b"].numpy().tolist() == [1.0, 1.0]


def test_thousands_of_names_in_two_files_are_said_in_a_few_lines(tmp_path: Path) -> None:
    everything = {f"t{k:04}": torch.ones(1) for k in range(1000)}
    weight_map: dict[str, str] = {}
    for number in range(10):
        safetensors.torch.save_file(everything, tmp_path / f"{number}.safetensors")
        weight_map |= {f"t{k:04}": f"{number}.safetensors" for k in range(100 * number, 100 * number + 100)}
    with open_source(write_index(tmp_path / "m.index.json", weight_map)) as source:
        lines = source.traits.warnings
    assert len(lines) == 6
    assert lines[0] == (
        "'t0100', 't0101', 't0102', 't0103', 't0104' and 95 more are also in '0.safetensors'; "
        "taken from '1.safetensors', as the index says"
    )
    assert lines[5] == "8500 tensors more are in two files; each was taken from the one that the index names"


def test_metadata_that_the_files_disagree_about_is_left_out(tmp_path: Path) -> None:
    for number in (1, 2):
        metadata = {"format": "pt", "shard": str(number)}
        tensors = {f"x{number}": torch.ones(1)}
        safetensors.torch.save_file(tensors, tmp_path / f"{number}.safetensors", metadata)
    weight_map = {"x1": "1.safetensors", "x2": "2.safetensors"}
    with open_source(write_index(tmp_path / "m.index.json", weight_map)) as source:
        assert source.catalog.metadata == {"format": "pt"}
        assert source.traits.warnings == ("the files disagree about the metadata 'shard': left out",)


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for path in [write_safetensors(tmp_path), *tmp_path.glob("*.safetensors")]:
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("..", "blobs", path.name))
    assert len(read_path(snapshot)) == 6


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "\ud800", "a\\b", 7, None])
def test_an_index_can_name_nothing_outside_its_folder(tmp_path: Path, file: object) -> None:
    """onnx#3991, onnx#6959: a file named by data was read from anywhere."""
    index = write_index(tmp_path / "m.index.json", {"w": file})
    with pytest.raises(UnsupportedCheckpointError, match="plain name of a file|places 'w' in"):
        open_source(index)


def test_a_file_that_is_missing_or_no_regular_file_is_named(tmp_path: Path) -> None:
    index = write_safetensors(tmp_path)
    missing = tmp_path / f"{SHARDS[1]}.safetensors"
    missing.unlink()
    with pytest.raises(UnsupportedCheckpointError, match=f"{missing.name}', which does not exist"):
        open_source(index)
    missing.mkdir()
    with pytest.raises(UnsupportedCheckpointError, match="not a regular file"):
        open_source(index)


def test_a_tensor_that_is_not_in_its_file_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    weight_map = {"embed": f"{SHARDS[0]}.safetensors", "nowhere": f"{SHARDS[0]}.safetensors"}
    index = write_index(tmp_path / "m.index.json", weight_map)
    with pytest.raises(UnsupportedCheckpointError, match="lists 1 tensor missing from .*: 'nowhere'"):
        open_source(index)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "has the key 'a' twice"),
        ('{"weight_map": {"a": {"b": 1}}}', "places 'a' in"),
        ("[" * 100_000, "is not JSON"),
        ('{"weight_map": {"a": 1' + "0" * 5000 + "}}", "is not JSON"),
        ("\udc80", "is not JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, why: str) -> None:
    index = tmp_path / "m.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnsupportedCheckpointError, match=why):
        open_source(index)


def test_an_index_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = write_safetensors(tmp_path)
    monkeypatch.setattr("stream_pack.sources.sets.hugging_face.MAX_INDEX_NBYTES", 100)
    with pytest.raises(UnsupportedCheckpointError, match="longer than 100 bytes"):
        open_source(index)


def test_a_damaged_shard_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    index = write_bin(tmp_path)
    shard = tmp_path / f"{SHARDS[1]}.bin"
    whole = shard.read_bytes()
    data = bytearray(whole)
    data[data.index(shards()[1]["layers.1.w"].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SourceChecksumError, match=rf"^'{shard.name}': .*layers\.1\.w"):
        stream_pack.convert(index, tmp_path / "out.pack")
    shard.write_bytes(whole[:-100])
    with pytest.raises(TruncatedSourceError, match=f"^'{shard.name}': "):
        stream_pack.convert(index, tmp_path / "out.pack")
    assert not (tmp_path / "out.pack").exists()


def test_files_stand_in_the_order_of_their_names_whatever_order_the_index_has(tmp_path: Path) -> None:
    index = write_safetensors(tmp_path)
    weight_map = json.loads(index.read_text())["weight_map"]
    with open_source(index) as source:
        names = source.catalog.names
    write_index(index, dict(sorted(weight_map.items(), key=lambda item: item[1], reverse=True)))
    with open_source(index) as source:
        assert source.catalog.names == names


def test_what_is_gathered_counts_as_made_from_its_own_shard(tmp_path: Path) -> None:
    with open_source(write_bin(tmp_path)) as source:
        catalog = source.catalog
        storages = dict(zip(catalog.names, catalog.storages.tolist()))
        nbytes = shards()[1]["head"].nbytes
        assert catalog.derived == {storages["turned"]: (storages["head"], 0, nbytes)}


def test_a_damaged_tensor_that_nobody_wants_is_found_all_the_same(tmp_path: Path) -> None:
    index = write_bin(tmp_path)
    shard = tmp_path / f"{SHARDS[0]}.bin"
    data = bytearray(shard.read_bytes())
    data[data.index(shards()[0]["layers.0.w"].numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with open_source(index) as source:
        rows = [source.catalog.names.index(name) for name in ("embed", "scalar", "tied")]
        _, requests = requests_for(source.catalog, rows)
        with pytest.raises(SourceChecksumError, match=r"layers\.0\.w"):
            collect(source, requests, options(in_order=True, spool=Spool("nowhere")))


def write_compressed(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A set whose first shard can only be read from its first byte to its last, its storages in reverse order."""
    tensors = {"b": torch.arange(50.0), "a": torch.arange(40.0), "c": torch.arange(30.0)}
    torch.save(tensors, folder / "1.bin")
    with zipfile.ZipFile(folder / "1.bin") as plain:
        members = {info.filename: plain.read(info) for info in plain.infolist()}
    storages = [name for name in members if "/data/" in name]
    order = [name for name in members if name not in storages] + storages[::-1]
    with zipfile.ZipFile(folder / "1.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in order:
            packed.writestr(name, members[name])
    torch.save({"d": torch.ones(3)}, folder / "2.bin")
    weight_map = dict.fromkeys("abc", "1.bin") | {"d": "2.bin"}
    return write_index(folder / "m.index.json", weight_map), tensors | {"d": torch.ones(3)}


@pytest.mark.usefixtures("spools_on_disk")
def test_a_compressed_shard_that_comes_in_its_own_order_is_spooled_for_a_stream(tmp_path: Path) -> None:
    index, _ = write_compressed(tmp_path)
    stream_pack.convert(index, tmp_path / "file.pack")
    with open(tmp_path / "stream.pack", "wb", buffering=0) as out:
        report = stream_pack.convert(index, out, spool_dir=tmp_path)
    assert (tmp_path / "stream.pack").read_bytes() == (tmp_path / "file.pack").read_bytes()
    assert report.spool_nbytes > 0


def test_a_shard_that_comes_in_its_own_order_is_not_waited_for(tmp_path: Path) -> None:
    index, tensors = write_compressed(tmp_path)
    with open_source(index) as source:
        assert not source.traits.chooses_order
        names = ["a", "d", "b", "c"]
        rows = [source.catalog.names.index(name) for name in names]
        _, requests = requests_for(source.catalog, rows)
        data = collect(source, requests, options(in_order=True, spool=Spool(tmp_path)))
    assert data == [tensors[name].numpy().tobytes() for name in names]


def test_every_file_counts_in_the_report(tmp_path: Path) -> None:
    """LC#16765: of several files only the last was kept."""
    report = stream_pack.convert(write_safetensors(tmp_path), tmp_path / "out.pack")
    assert report.source_nbytes == sum(t.nbytes for shard in shards() for t in shard.values())
