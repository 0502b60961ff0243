"""Checkpoints that another program has packed again: compressed, in another order, with folders."""

from __future__ import annotations

import gzip
import io
import sys
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable, Container
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import stream_pack
from stream_pack.errors import (
    LimitError,
    SourceChecksumError,
    SourceError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
)
from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.open import open_source
from stream_pack.sources.torch_save.zip import TorchZipSource
from tests.sources.byte_sources import file_stream, pipe_stream
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, collect, options, requests_for
from tests.sources.torch_save.test_zip import expected_of
from tests.support.damage import (
    UNREADABLE,
    Share,
    assert_refusal,
    check_each,
    cut,
    may_refuse,
    some_or_all,
    two_bits_of_each_byte,
)
from tests.support.spools import needs_memory_files, on_disk, without_a_folder
from tests.support.torch_zips import as_torch_has_it, records, repacked, saved
from tests.support.zips import Member, archive

MIB = 1 << 20


class Pipe(io.RawIOBase):
    """A target that only takes bytes, in order."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(bytes(data))  # type: ignore[call-overload]


def zipped(parts: dict[str, bytes], *, streamed: bool = False, level: int = 6) -> bytes:
    """An archive of these records as the interpreter's zipfile deflates it."""
    target = Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as made:
        for name, data in parts.items():
            made.writestr(f"model/{name}", data)
    return bytes(target.data if isinstance(target, Pipe) else target.getvalue())


def tensors() -> dict[str, torch.Tensor]:
    w = torch.arange(1200.0).reshape(30, 40)
    noise = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {
        "w": w, "wt": w.t(), "row": w[3:5], "e": torch.empty(0, 2), "noise": noise, "one": torch.tensor(5),
    }  # fmt: skip


def wanted() -> dict[str, bytes]:
    return {name: as_torch_has_it(tensor) for name, tensor in tensors().items()}


class TestADeflatedFile(SourceSuite):
    chooses_order = False

    @pytest.fixture
    def data(self) -> bytes:
        return zipped(records(saved(tensors())))

    @pytest.fixture
    def make(self, data: bytes, tmp_path: Path) -> MakeSource:
        return lambda: TorchZipSource(file_stream(data, tmp_path))

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(tensors())


class TestADeflatedPipe(TestADeflatedFile):
    @pytest.fixture
    def make(self, data: bytes) -> MakeSource:
        return lambda: TorchZipSource(pipe_stream(data, step=1))


class TestADeflatedStream(TestADeflatedPipe):
    """Packed by a program that could not seek: lengths and CRC-32 stand behind the deflated bytes."""

    @pytest.fixture
    def data(self) -> bytes:
        return zipped(records(saved(tensors())), streamed=True)


class TestADeflatedFileWhosePickleIsNotFirst(TestADeflatedFile):
    @pytest.fixture
    def data(self) -> bytes:
        return zipped(dict(sorted(records(saved(tensors())).items())))


class TestAPipeWhosePickleIsNotFirst(SourceSuite):
    """All of it goes through the spool, and is then read like a file."""

    @pytest.fixture
    def make(self, spool: Spool) -> MakeSource:
        data = repacked(dict(sorted(records(saved(tensors())).items())))
        return lambda: TorchZipSource(pipe_stream(data, step=4096), spool=spool)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(tensors())


# -- the same pack, whatever was done to the archive


def reordered(name: str) -> bytes:
    parts = records(saved(tensors()))
    storages = [key for key in parts if key.startswith("data/")]
    others = [key for key in parts if not key.startswith("data/") and key != "data.pkl"]
    order = {
        "reversed storages": ["data.pkl", *others, *reversed(storages)],
        "lexicographic": ["data.pkl", *sorted(storages), *others],
        "pickle last": [*others, *storages, "data.pkl"],
    }[name]
    return repacked({key: parts[key] for key in order})


def with_pointers() -> bytes:
    """As torch 1.5 named its storages."""
    parts = records(saved(tensors()))
    keys = {f"data/{k}": f"data/{94743424565712 + 64 * k}" for k in range(10)}
    pickle = parts["data.pkl"]
    for k in range(10):
        old = f"X\x01\0\0\0{k}".encode()
        pickle = pickle.replace(old + b"q", f"X\x0e\0\0\0{94743424565712 + 64 * k}".encode() + b"q")
    parts = {keys.get(name, name): data for name, data in parts.items()} | {"data.pkl": pickle}
    return repacked({name: data for name, data in parts.items() if name != "byteorder"})


def with_folders() -> bytes:
    """As ``zip -r`` packs an unpacked folder."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        made.mkdir("model") if sys.version_info >= (3, 11) else made.writestr("model/", b"")
        made.writestr("model/data/", b"")
        for name, data in sorted(records(saved(tensors())).items()):
            made.writestr(f"model/{name}", data)
    return target.getvalue()


VARIANTS: dict[str, Callable[[], bytes]] = {
    "deflated": lambda: zipped(records(saved(tensors()))),
    "deflated stream": lambda: zipped(records(saved(tensors())), streamed=True),
    "reversed storages": lambda: reordered("reversed storages"),
    "lexicographic": lambda: reordered("lexicographic"),
    "pickle last": lambda: reordered("pickle last"),
    "pointers as keys": with_pointers,
    "folders": with_folders,
}


@pytest.mark.parametrize("to", ["file", "stream"])
@pytest.mark.parametrize("how", ["file", "pipe"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pack_is_the_same_whatever_was_done_to_the_archive(tmp_path: Path, variant: str, how: str, to: str) -> None:
    """PT#37985, PT#7736: other tools pack checkpoints again, and pipes give them in order only."""
    stream_pack.convert(tensors(), tmp_path / "expected")
    (tmp_path / "source").write_bytes(VARIANTS[variant]())
    source = tmp_path / "source" if how == "file" else ByteSource((tmp_path / "source").read_bytes())
    target = tmp_path / "pack"
    if to == "file":
        stream_pack.convert(source, target)
    else:
        with open(target, "wb") as out:
            stream_pack.convert(source, Forward(out), spool_dir=tmp_path)
    assert target.read_bytes() == (tmp_path / "expected").read_bytes()


class ByteSource:
    """A pipe."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, nbytes: int, /) -> bytes:
        return self._file.read(min(nbytes, 16384))


class Forward:
    """A target that is no file to anyone."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file

    def write(self, data: memoryview, /) -> int:
        return self._file.write(data)


@pytest.mark.parametrize("spool_dir", [True, False])
@pytest.mark.parametrize("much", [True, False])
def test_the_keys_of_an_archive_that_needs_the_spool_are_listed(
    spool_dir: bool, much: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("gone" if spool_dir else "")))
    with on_disk() if much else nullcontext():
        (row,) = stream_pack.list_keys(ByteSource(reordered("pickle last")), spool_dir=tmp_path if spool_dir else None)
    assert isinstance(row, stream_pack.KeySummary)
    assert (row.path, row.kind, row.chosen) == ((), "dict", True)
    assert list(tmp_path.iterdir()) == []


def test_the_pickle_of_an_archive_that_needs_the_spool_is_read_under_the_limit(tmp_path: Path) -> None:
    data = reordered("pickle last")
    with pytest.raises(LimitError, match="reading what the source holds"):
        open_source(ByteSource(data), spool=Spool(tmp_path), max_memory=1)


@needs_memory_files
def test_an_archive_that_needs_the_spool_says_so(tmp_path: Path) -> None:
    data = reordered("pickle last")
    report = stream_pack.convert(ByteSource(data), tmp_path / "pack")
    assert report.spool_nbytes == 0
    assert f"all {len(data)} bytes were spooled in memory" in report.remarks[-1]
    with on_disk():
        report = stream_pack.convert(ByteSource(data), tmp_path / "pack")
    assert report.spool_nbytes == len(data)
    assert f"all {len(data)} bytes were spooled on disk" in report.remarks[-1]
    with without_a_folder(), pytest.raises(LimitError, match="does not begin with data.pkl.*--spool-dir"):
        stream_pack.convert(ByteSource(data), Forward(io.BufferedWriter(Pipe())))
    with pytest.raises(UnsupportedCheckpointError, match=r"first record is .*"):
        stream_pack.forecast(ByteSource(data))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack"]


@pytest.mark.parametrize("how", ["file", "pipe"])
def test_an_archive_of_something_else_in_a_folder_is_refused(tmp_path: Path, how: str) -> None:
    data = archive([Member("docs/", b"", streamed=False), Member("docs/data.txt", b"x")])
    (tmp_path / "docs.zip").write_bytes(data)
    source = tmp_path / "docs.zip" if how == "file" else ByteSource(data)
    with pytest.raises(UnsupportedCheckpointError, match=r"not a checkpoint of torch\.save.*docs/data\.txt"):
        stream_pack.convert(source, tmp_path / "pack")


def mixed(parts: dict[str, bytes], *, deflated: Container[str]) -> bytes:
    """Some programs store what does not become shorter."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        for name, data in parts.items():
            method = zipfile.ZIP_DEFLATED if name in deflated else zipfile.ZIP_STORED
            made.writestr(f"model/{name}", data, compress_type=method)
    return target.getvalue()


@pytest.mark.usefixtures("spools_on_disk")
def test_what_waits_of_a_file_that_is_deflated_in_part_is_foretold(tmp_path: Path) -> None:
    """The first storage is stored, and the directory tells of the others."""
    parts = records(saved({f"t{k}": torch.full((1000,), float(k)) for k in range(4)}))
    storages = [f"data/{k}" for k in (2, 0, 3, 1)]  # t2 waits for two, t3 for one
    order = ["data.pkl", "byteorder", *storages, "version"]
    path = tmp_path / "source"
    path.write_bytes(mixed({name: parts[name] for name in order}, deflated={"data/3"}))
    stream_pack.convert(path, tmp_path / "pack")
    target = Pipe()
    report = stream_pack.convert(path, Forward(io.BufferedWriter(target, 1)), spool_dir=tmp_path)
    assert target.data == (tmp_path / "pack").read_bytes()
    forecast = stream_pack.forecast(path, to_stream=True)
    assert forecast.spool_nbytes == report.spool_nbytes == 8000
    assert stream_pack.load_file(tmp_path / "pack")["t3"].tolist() == [3.0] * 1000


def test_a_storage_that_was_deflated_to_less_than_itself_is_not_called_truncated(tmp_path: Path) -> None:
    parts = records(saved({"a": torch.arange(10.0), "b": torch.zeros(100_000)}))
    path = tmp_path / "source"
    path.write_bytes(mixed(parts, deflated={"data/1"}))
    assert path.stat().st_size < 400_000
    assert stream_pack.forecast(path).source_nbytes == 400_040
    stream_pack.convert(path, tmp_path / "pack")
    assert not stream_pack.load_file(tmp_path / "pack")["b"].any()


def test_a_directory_that_hides_a_compressed_record_is_refused(tmp_path: Path) -> None:
    parts = records(saved({"a": torch.arange(10.0), "b": torch.zeros(100)}))
    data = bytearray(mixed(parts, deflated={"data/1"}))
    entry = data.rindex(b"model/data/1") - 46  # a directory's entry has 46 bytes before the name
    assert data[entry + 10] == zipfile.ZIP_DEFLATED
    data[entry + 10] = zipfile.ZIP_STORED
    path = tmp_path / "source"
    path.write_bytes(data)
    for target in (tmp_path / "pack", Forward(io.BufferedWriter(Pipe()))):
        with pytest.raises(SourceError, match=r"data/1.* method|directory says it is not"):
            stream_pack.convert(path, target)


# -- damage, and bombs


def read(source: Source) -> dict[str, bytes]:
    with source:
        catalog = source.catalog
        kept, requests = requests_for(catalog)
        data = collect(source, requests, options())
        return dict.fromkeys(catalog.names, b"") | {catalog.names[k]: d for k, d in zip(kept, data)}


def small() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(5.0), "b": torch.arange(300, dtype=torch.uint8)}


@some_or_all(7)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_deflated_archive_cut_or_flipped_anywhere_is_refused_or_the_same(streamed: bool, share: Share) -> None:
    data = zipped(records(saved(small())), streamed=streamed)
    clean = read(TorchZipSource(pipe_stream(data, step=65536)))
    assert clean == {name: as_torch_has_it(tensor) for name, tensor in small().items()}

    def check_cut(beginning: bytes) -> None:
        with pytest.raises(SourceError) as caught:
            read(TorchZipSource(pipe_stream(beginning, step=65536)))
        assert_refusal(caught.value, TruncatedSourceError)

    def check_flipped(broken: bytes) -> None:
        with may_refuse(*UNREADABLE):
            assert read(TorchZipSource(pipe_stream(broken, step=65536))) == clean

    check_each(cut(data, share.of(range(1, len(data)))), check_cut)
    check_each(two_bits_of_each_byte(data, 3, share), check_flipped)


def test_a_deflated_record_of_another_length_is_refused() -> None:
    for nbytes in (19, 21, 100_000):
        parts = records(saved({"a": torch.arange(5.0)})) | {"data/0": bytes(nbytes)}
        for streamed in (False, True):
            with pytest.raises(SourceError, match="expands to"):
                read(TorchZipSource(pipe_stream(zipped(parts, streamed=streamed), step=65536)))


def test_a_deflated_record_with_a_wrong_crc_names_the_tensor() -> None:
    data = bytearray(zipped(records(saved({"a": torch.arange(5.0)})), streamed=True))
    descriptor = data.index(b"PK\7\10", data.index(b"data/0"))
    data[descriptor + 4] ^= 1
    with pytest.raises(SourceChecksumError, match="tensor 'a'"):
        read(TorchZipSource(pipe_stream(bytes(data), step=65536)))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_compressed_length_that_is_not_what_was_read_is_refused(streamed: bool) -> None:
    data = bytearray(zipped(records(saved({"a": torch.arange(5.0)})), streamed=streamed))
    name = data.index(b"model/data/0")
    # Behind the CRC-32: in the descriptor, or in the header, whose 30 bytes end where the name begins.
    data[data.index(b"PK\7\10", name) + 8 if streamed else name - 30 + 18] ^= 1
    with pytest.raises(SourceError, match="compressed bytes, but the archive states"):
        read(TorchZipSource(pipe_stream(bytes(data), step=65536)))


def test_bytes_behind_a_deflated_pickle_are_refused() -> None:
    parts = records(saved(small()))
    parts["data.pkl"] += b"x" * 100_000
    with pytest.raises(SourceError, match="bytes follow the pickle"):
        TorchZipSource(pipe_stream(zipped(parts), step=65536))


def test_a_zip_bomb_of_a_record_that_nobody_wants_stays_within_memory() -> None:
    parts = records(saved({"w": torch.ones(1)}))
    data = zipped(parts | {"data/7": bytes(256 * MIB)}, level=9)
    assert len(data) < MIB
    tracemalloc.start()
    try:
        source = TorchZipSource(pipe_stream(data, step=65536))
        _, requests = requests_for(source.catalog)
        for _ in source.stream(requests, options(chunk_nbytes=MIB)):
            pass
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_a_zip_bomb_for_a_pickle_is_refused() -> None:
    parts = records(saved({"w": torch.ones(1)}))
    parts["data.pkl"] = b"\x80\x02X" + (1 << 30).to_bytes(4, "little") + bytes(200 * MIB)
    with pytest.raises(UnsupportedCheckpointError, match="string"):
        TorchZipSource(pipe_stream(zipped(parts, level=1), step=65536))


def test_a_gibibyte_of_deflated_zeros_takes_the_memory_of_a_few_chunks(tmp_path: Path) -> None:
    """A storage that expands a thousandfold: what is written has its length, what is held has not."""
    from tests.support.memory import measure

    numel = 256 * MIB
    template = records(saved({"w": torch.zeros(numel, dtype=torch.uint8)[:1].clone()}))
    pickle = template["data.pkl"].replace(b"K\x01tq", b"J" + numel.to_bytes(4, "little") + b"tq")
    pickle = pickle.replace(b"K\0K\x01\x85", b"K\0J" + numel.to_bytes(4, "little") + b"\x85")
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in template.items():
            if name == "data.pkl":
                made.writestr(f"m/{name}", pickle)
            elif name == "data/0":
                with made.open(f"m/{name}", "w") as record:
                    for _ in range(numel // MIB):
                        record.write(bytes(MIB))
            else:
                made.writestr(f"m/{name}", data)
    assert path.stat().st_size < MIB
    command = [sys.executable, "-m", "stream_pack", "convert", "--quiet", str(path), str(tmp_path / "pack")]
    assert measure(command).peak_anonymous_nbytes < 80 * MIB
    with stream_pack.open(tmp_path / "pack") as pack:
        assert pack["w"].shape == (numel,)
        assert not pack["w"].numpy()[:: 1 << 16].any()
    (tmp_path / "pack").unlink()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_compressed_checkpoint_is_read_through_the_object_that_expands_it(tmp_path: Path, legacy: bool) -> None:
    """PT#37985: such an object has a descriptor too, and other bytes behind it."""
    with gzip.open(tmp_path / "model.pt.gz", "wb") as file:
        torch.save(tensors(), file, _use_new_zipfile_serialization=not legacy)  # type: ignore[arg-type]
    with gzip.open(tmp_path / "model.pt.gz") as opened:
        stream_pack.convert(opened, tmp_path / "pack")
    stream_pack.convert(tensors(), tmp_path / "expected")
    assert (tmp_path / "pack").read_bytes() == (tmp_path / "expected").read_bytes()
    with pytest.raises(UnsupportedCheckpointError, match="gzip -dc"):
        stream_pack.convert(tmp_path / "model.pt.gz", tmp_path / "pack")
