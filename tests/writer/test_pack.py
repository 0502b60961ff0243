"""Whole packs, read back by the minimal reader that knows FORMAT.md and nothing of this package."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from stream_pack.errors import LimitError, OptionError, SourceError, TruncatedSourceError
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.pipeline.chunks import Chunk, Piece, Zeros
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits
from stream_pack.pipeline.spool import Spool
from stream_pack.writer.convert import convert, save_file
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.pack import write_pack
from stream_pack.writer.report import Report
from stream_pack.writer.sink import FileSink, Sink, StreamSink, open_sink
from tests.support.spools import without_a_folder
from tests.vectors import minimal_reader

U8 = BY_NAME["uint8"]


class ScriptedSource(Source):
    """A source that delivers exactly the pieces it was given."""

    def __init__(self, nbytes: dict[str, int], script: list[Piece], *, fail: BaseException | None = None) -> None:
        builder = CatalogBuilder()
        for number, (name, length) in enumerate(nbytes.items()):
            builder.add(name, U8, (length,), storage=number, start=0)
        catalog = builder.build(storages_nbytes=sum(nbytes.values()))
        sparse = any(isinstance(chunk, Zeros) for _, chunk in script)
        super().__init__(catalog, Traits("script", sparse=sparse))
        self._script = script
        self._fail = fail

    @property
    def verification(self) -> str:
        return "nothing to verify"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        yield from self._script
        if self._fail is not None:
            raise self._fail


def write(source: Source, sink: Sink, *, spool: Spool | None = None, block_nbytes: int = 4096, jobs: int = 1) -> Report:
    with sink:
        return write_pack(
            source,
            sink,
            ConvertOptions(block_nbytes=block_nbytes, jobs=jobs).settings,
            spool=spool or Spool(sink.folder),
            progress=None,
        )


def check(data: bytes, tensors: dict[str, bytes]) -> None:
    """The file says what it should, and every checksum in it is right by xxhash's own word."""
    pack = minimal_reader.read(data)
    assert {name: tensor.data for name, tensor in pack.tensors.items()} == tensors
    assert list(pack.tensors) == list(tensors)
    assert pack.nbytes == len(data)
    assert xxhash.xxh3_64_intdigest(pack.covered_head) == pack.head_checksum
    assert [xxhash.xxh3_64_intdigest(block) for block in pack.blocks] == pack.block_checksums
    assert xxhash.xxh3_64_intdigest(pack.covered_by_root) == pack.root_checksum


A, B = bytes(range(256)) * 40, b"\xaa" * 777


@pytest.mark.parametrize("jobs", [1, 2, 3, 4])
def test_pieces_may_alternate_between_buffers(tmp_path: Path, jobs: int) -> None:
    script: list[Piece] = [(1, B[:7]), (0, A[:5000]), (1, B[7:]), (0, A[5000:5001]), (0, A[5001:])]
    path = tmp_path / "f"
    write(ScriptedSource({"a": len(A), "b": len(B)}, script), FileSink(path), jobs=jobs)
    check(path.read_bytes(), {"a": A, "b": B})


@pytest.mark.parametrize("jobs", [1, 2, 3])
@pytest.mark.usefixtures("spools_on_disk")
def test_a_stream_gets_the_same_bytes_and_what_comes_early_waits_on_disk(tmp_path: Path, jobs: int) -> None:
    script: list[Piece] = [
        (2, B[:7]),
        (1, Zeros(3)),
        (0, A[:5000]),
        (1, B[:10]),
        (0, A[5000:]),
        (2, B[7:]),
        (1, Zeros(10_000)),
    ]
    nbytes = {"a": len(A), "z": 10_013, "b": len(B)}
    path = tmp_path / "f"
    write(ScriptedSource(nbytes, script), FileSink(path))
    check(path.read_bytes(), {"a": A, "z": bytes(3) + B[:10] + bytes(10_000), "b": B})
    stream = io.BytesIO()
    report = write(ScriptedSource(nbytes, script), StreamSink(stream), spool=Spool(tmp_path), jobs=jobs)
    assert stream.getvalue() == path.read_bytes()
    # At most waits: all of b, after z was sent on.
    assert report.spool_nbytes == len(B)
    assert list(tmp_path.iterdir()) == [path]


def test_a_stream_without_a_place_for_the_spool_is_refused_with_the_bytes_it_may_need() -> None:
    script: list[Piece] = [(1, B), (0, A)]
    source = ScriptedSource({"a": len(A), "b": len(B)}, script)
    with without_a_folder(), pytest.raises(LimitError, match=rf"{len(A) + len(B)} bytes .*--spool-dir"):
        write(source, StreamSink(io.BytesIO()))


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_source_that_ends_early_is_refused_naming_the_tensor(tmp_path: Path, jobs: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    source = ScriptedSource({"a": len(A), "b": len(B)}, [(1, B), (0, A[:-1])])
    with pytest.raises(TruncatedSourceError, match=rf"{len(A) - 1} of {len(A)} bytes of tensor 'a'"):
        write(source, FileSink(path), jobs=jobs)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("script", [[(0, A + b"x")], [(0, A), (0, b"x")], [(0, Zeros(1 << 50))]])
def test_a_source_that_delivers_too_much_is_refused(tmp_path: Path, script: list[Piece]) -> None:
    with pytest.raises(SourceError, match=rf"more than the {len(A)} bytes .* 'a'"):
        write(ScriptedSource({"a": len(A)}, script), FileSink(tmp_path / "f"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyError("mine"), OSError(5, "gone"), KeyboardInterrupt()])
def test_an_error_of_the_source_passes_unchanged(tmp_path: Path, jobs: int, error: BaseException) -> None:
    source = ScriptedSource({"a": len(A)}, [(0, A[:100])], fail=error)
    with pytest.raises(type(error)) as caught:
        write(source, FileSink(tmp_path / "f"), jobs=jobs)
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_the_head_reaches_the_sink_before_the_source_is_asked_for_data(tmp_path: Path) -> None:
    stream = io.BytesIO()

    class Watching(ScriptedSource):
        def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
            # 2 MiB: more than the sink holds back.
            for _ in range(512):
                yield 0, bytes(4096)
            seen.append(len(stream.getvalue()))
            yield 0, bytes(4096)

    seen: list[int] = []
    write(Watching({"a": 513 * 4096}, []), StreamSink(stream))
    assert seen[0] > 1 << 20


def test_blocks_are_hashed_alike_however_the_chunks_fall() -> None:
    data = np.random.default_rng(1).bytes(3 * 4096 + 5)
    cuts: list[list[int]] = [[], [4096], [4095, 4097], [1, 8192], [8192, 12288], list(range(1, 12000, 7))]
    outputs = set()
    for cut in cuts:
        edges = [0, *cut, len(data)]
        script: list[Piece] = [(0, data[begin:end]) for begin, end in itertools.pairwise(edges)]
        stream = io.BytesIO()
        write(ScriptedSource({"a": len(data)}, script), StreamSink(stream))
        outputs.add(stream.getvalue())
    assert len(outputs) == 1
    check(outputs.pop(), {"a": data})


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 8192, 1 << 20])
@pytest.mark.parametrize("lead", [0, 5])
def test_announced_zeros_are_hashed_like_real_ones(nbytes: int, lead: int) -> None:
    def pack(zeros: Chunk) -> bytes:
        stream = io.BytesIO()
        script: list[Piece] = [(0, b"x" * lead), (0, zeros), (0, b"tail")]
        write(ScriptedSource({"a": lead + nbytes + 4}, script), StreamSink(stream))
        return stream.getvalue()

    assert pack(Zeros(nbytes)) == pack(bytes(nbytes))
    check(pack(Zeros(nbytes)), {"a": b"x" * lead + bytes(nbytes) + b"tail"})


ARRAYS = {
    "big": np.arange(300_000, dtype="<f4"),
    "small": np.arange(7, dtype="<i2"),
    "empty": np.empty((0, 3), "<f8"),
    "scalar": np.array(2.5),
    "é\n": np.arange(6, dtype="u1").reshape(2, 3).T,
}


def packed(**options: object) -> bytes:
    stream = io.BytesIO()
    convert(ARRAYS, stream, block_nbytes=4096, metadata={"b": "2", "a": "1"}, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def test_chunk_lengths_and_threads_leave_no_trace_in_the_bytes(tmp_path: Path) -> None:
    outputs = {packed(chunk_nbytes=n, jobs=1) for n in (7, 4096, 4 << 20)}
    outputs |= {packed(jobs=jobs) for jobs in (1, 2, 3, 4)}
    path = tmp_path / "f"
    convert(ARRAYS, path, block_nbytes=4096, metadata={"a": "1", "b": "2"})
    outputs.add(path.read_bytes())
    assert len(outputs) == 1
    check(outputs.pop(), {name: array.tobytes() for name, array in ARRAYS.items()})


def test_chunks_of_one_byte_give_the_same_bytes() -> None:
    small = {"a": np.arange(900, dtype="<u2"), "b": np.arange(5, dtype="u1")}

    def pack(chunk_nbytes: int) -> bytes:
        stream = io.BytesIO()
        convert(small, stream, chunk_nbytes=chunk_nbytes, block_nbytes=4096)
        return stream.getvalue()

    assert pack(1) == pack(1 << 20)


PROGRAM = """
import hashlib, io, numpy as np, stream_pack
stream = io.BytesIO()
stream_pack.convert({f"t{n}": np.full(n, n, "<u4") for n in range(50)}, stream,
                    metadata={key: key for key in {"one", "two", "three", "four"}})
print(hashlib.sha256(stream.getvalue()).hexdigest())
"""


def test_processes_with_other_hash_seeds_write_the_same_bytes() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


def test_the_bytes_of_a_pack_are_pinned() -> None:
    # Changing this value changes the format: it needs a new version, and a reader for this one for ever.
    data = packed()
    assert hashlib.sha256(data).hexdigest() == GOLDEN, "the bytes of a pack have changed"


GOLDEN = "f765215676c979b5a5210a5609174b71d47a5fdb60d0f0474e2a7a4a06bef11b"


def test_metadata_is_kept_and_sorted_by_key() -> None:
    pack = minimal_reader.read(packed())
    assert list(pack.metadata.items()) == [("a", "1"), ("b", "2")]


def test_source_and_pack_bytes_add_up(tmp_path: Path) -> None:
    path = tmp_path / "f"
    base = np.zeros(10_000, np.uint8)
    report = convert({"a": base[:5000], "tied": base[:5000], "c": base[12:5000:2]}, path)
    assert report.source_nbytes == 10_000
    assert report.target_nbytes == path.stat().st_size
    assert (
        report.target_nbytes
        == report.source_nbytes
        - report.unused_nbytes
        + report.repeated_nbytes
        + report.padding_nbytes
        + report.overhead_nbytes
    )
    assert report.tied == 1
    assert f"{report.checksum:016x}" in report.summary()


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(ARRAYS, tmp_path / "f", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert 0 < seen[-1][0] <= seen[-1][1]


@pytest.mark.parametrize("options", [{"jobs": 0}, {"jobs": -1}, {"chunk_nbytes": 0}])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(LimitError):
        convert(ARRAYS, tmp_path / "f", **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"jobs": 2.5}, "jobs=2.5: expected a whole number"),
        ({"jobs": True}, "expected a whole number"),
        ({"chunk_nbytes": "1M"}, "expected a whole number"),
        ({"max_memory": "1G"}, "max_memory='1G': expected a whole number"),
        ({"include": b"a"}, "include=b'a': expected a glob"),
        ({"include": 5}, "include=5: expected a glob"),
        ({"exclude": ["a", 5]}, "exclude=.*: expected a glob"),
        ({"rename": 5}, "rename=5: expected 's/REGEX/REPLACEMENT/'"),
        ({"rename": ["s/a/b/", None]}, "rename=.*: expected 's/REGEX/REPLACEMENT/'"),
        ({"rename": len}, "rename= returned 3 for 'big': expected text"),
        ({"alignment": 16384}, r"expected stream_pack.Alignment\(small=..., large=...\)"),
        ({"metadata": "abc"}, "expected a mapping of strings to strings"),
        ({"metadata": {"step": 7}}, "expected a mapping of strings to strings"),
        ({"metadata": {7: "step"}}, "expected a mapping of strings to strings"),
    ],
)
def test_options_of_another_type_are_refused_in_words(
    tmp_path: Path, options: dict[str, object], expected: str
) -> None:
    with pytest.raises(OptionError, match=expected):
        convert(ARRAYS, tmp_path / "f", **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_output_grows_before_the_source_ends(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    seen: list[int] = []

    class Growing(ScriptedSource):
        def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
            for _ in range(64):
                yield 0, bytes(1 << 20)
                seen.append(os.fstat(file.fileno()).st_size)

    with open(path, "wb", buffering=0) as file:
        write(Growing({"a": 64 << 20}, []), open_sink(file.fileno()), jobs=3)
    assert seen[-1] > 40 << 20


def test_a_slice_of_a_large_tensor_takes_no_more_room_than_itself(tmp_path: Path) -> None:
    # PT#1995, PT#33101, PT#40157: ten elements of 10**8 asked for.
    path = tmp_path / "f"
    report = save_file({"w": torch.zeros(10**8)[:10]}, path)
    assert path.stat().st_size < 64 << 10
    assert minimal_reader.read(path.read_bytes()).tensors["w"].data == bytes(40)
    assert report.source_nbytes == 4 * 10**8
    assert report.unused_nbytes == 4 * 10**8 - 40
    assert "381 MiB in, " in report.summary()
    assert "381 MiB unused dropped" in report.summary()


def test_a_file_is_not_overwritten_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    convert(ARRAYS, path)
    before = path.read_bytes()
    with open(path, "r+b") as target:
        for source in (path, str(path)):
            with pytest.raises(SourceError, match="open for writing, and is the file of the source"):
                convert(source, target)
        with (
            open(path, "rb") as source_file,
            pytest.raises(SourceError, match="open for writing, and is the file of the source"),
        ):
            convert(source_file, target.fileno())
        with pytest.raises(SourceError, match="open for writing, and is the file of the source"):
            convert(tmp_path, target)  # a set reads the files of its folder
    assert path.read_bytes() == before
    with open(tmp_path / "copy", "wb") as target:
        convert(path, target)
    assert (tmp_path / "copy").read_bytes() == before


@pytest.mark.parametrize("key", ["module", "."])
def test_a_pack_of_nothing_but_empty_tensors_is_a_warning(key: str, tmp_path: Path) -> None:
    # What DeepSpeed's ZeRO stage 3 leaves in the file of a rank's model.
    module = {"w": torch.empty(0), "b": torch.empty(0)}
    shapes = [{"w": torch.Size([6, 3]), "b": torch.Size([3])}]
    torch.save({"module": module, "param_shapes": shapes}, tmp_path / "mp_rank_00_model_states.pt")
    report = convert(tmp_path / "mp_rank_00_model_states.pt", tmp_path / "pack", key=key)
    (warning,) = report.warnings
    assert "all 2 tensors are empty" in warning
    assert "*_optim_states.pt" in warning


def test_one_tensor_with_data_among_empty_ones_is_no_warning(tmp_path: Path) -> None:
    tensors = {"w": torch.empty(0), "b": torch.ones(1)}
    assert save_file(tensors, tmp_path / "pack").warnings == ()
    (warning,) = save_file({"w": torch.empty(0)}, tmp_path / "pack").warnings
    assert "the only tensor is empty" in warning
