"""One pack from several writers: the bytes of one writer's pack, or an error that says what is wrong."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.errors import (
    FormatError,
    LimitError,
    OptionError,
    SourceError,
    StateError,
    StreamPackError,
    UnknownTensorError,
    UnsupportedTensorError,
)
from stream_pack.format.header import To
from stream_pack.writer.parallel import ParallelWriter, Part, PartWriter
from tests.vectors import minimal_reader
from tests.writer import save_together

REPOSITORY = Path(__file__).parents[2]
BLOCK = 4096
SPECS = {"a": ("uint8", (3 * BLOCK + 5,)), "none": ("float32", (0, 2)), "b": ("uint16", (2, 3))}
A = np.random.default_rng(0).bytes(3 * BLOCK + 5)
B = bytes(range(12))


def parallel(path: Path) -> ParallelWriter:
    return ParallelWriter(path, SPECS, block_nbytes=BLOCK)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The pack of one writer."""
    path = tmp_path_factory.mktemp("alone") / "f"
    with stream_pack.Writer(path, SPECS, block_nbytes=BLOCK) as writer:
        writer.write("a", A)
        writer.write("b", B)
    data = path.read_bytes()
    assert minimal_reader.read(data).tensors["a"].data == A
    return data


def part_of(pack: ParallelWriter, *writes: tuple[str, bytes, int]) -> Part:
    with PartWriter(pack.unfinished_path) as writer:
        for name, data, begin in writes:
            writer.write(name, data, begin=begin)
        return writer.finish()


@pytest.mark.slow  # torchrun, which starts torch twice
def test_two_gloo_ranks_write_the_very_file_that_one_process_saves(tmp_path: Path) -> None:
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", save_together.__name__, str(tmp_path / "ranks.pack"),
    ]  # fmt: skip
    result = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    stream_pack.save_file(
        save_together.whole_model(),
        tmp_path / "alone.pack",
        metadata=save_together.METADATA,
        block_nbytes=save_together.BLOCK_NBYTES,
    )
    assert (tmp_path / "ranks.pack").read_bytes() == (tmp_path / "alone.pack").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.pack", "ranks.pack"]


@given(
    cuts=st.lists(st.integers(0, len(A)), max_size=6),
    writers=st.integers(1, 4),
    step=st.sampled_from([1000, BLOCK, len(A)]),
    seed=st.randoms(use_true_random=False),
)
def test_wherever_the_ranges_are_cut_the_bytes_are_the_same(
    alone: bytes,
    tmp_path_factory: pytest.TempPathFactory,
    cuts: list[int],
    writers: int,
    step: int,
    seed: random.Random,
) -> None:
    ends = sorted({0, *cuts, len(A)})
    ranges = list(pairwise(ends))
    seed.shuffle(ranges)
    path = tmp_path_factory.mktemp("parts") / "f"
    with parallel(path) as pack:
        parts = []
        for number in range(writers):
            with PartWriter(pack.unfinished_path) as writer:
                for begin, end in ranges[number::writers]:
                    data = A[begin:end]
                    chunks = (data[at : at + step] for at in range(0, len(data), step))
                    writer.write("a", chunks, begin=begin)
                if number == 0:
                    writer.write("b", B)
                parts.append(pickle.loads(pickle.dumps(writer.finish())))
        seed.shuffle(parts)
        pack.commit(parts)
    assert path.read_bytes() == alone


@pytest.mark.parametrize("to", ["mps", "xnnpack", "ptd"])
def test_whatever_header_it_begins_with(to: To, tmp_path: Path) -> None:
    with ParallelWriter(tmp_path / "f", SPECS, to=to) as pack:
        pack.commit([part_of(pack, ("a", A, 0)), part_of(pack, ("b", B, 0))])
    with stream_pack.Writer(tmp_path / "alone", SPECS, to=to) as writer:
        writer.write("a", A)
        writer.write("b", B)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "alone").read_bytes()


def test_threads_may_write_at_once(alone: bytes, tmp_path: Path) -> None:
    with parallel(tmp_path / "f") as pack, ThreadPoolExecutor(4) as pool:
        bounds = range(0, len(A), 1000)
        parts = list(pool.map(lambda begin: part_of(pack, ("a", A[begin : begin + 1000], begin)), bounds))
        pack.commit([*parts, part_of(pack, ("b", B, 0))])
    assert (tmp_path / "f").read_bytes() == alone


def test_the_target_is_replaced_by_commit_and_not_before(alone: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with parallel(path) as pack:
        part = part_of(pack, ("a", A, 0), ("b", B, 0))
        assert path.read_bytes() == b"old"
        pack.commit([part])
        assert path.read_bytes() == alone
        with pytest.raises(StateError, match="closed"):
            pack.commit([part])
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("abandon", [True, False])
def test_an_abandoned_pack_leaves_the_target_as_it_was(abandon: bool, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with parallel(path) as pack:
        part_of(pack, ("a", A, 0))
        if abandon:
            pack.abandon()
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([("a", A, 0)], r"lack 12 bytes of the tensors 'b'"),
        ([], r"lack 12305 bytes of the tensors 'a', 'b'"),
        ([("a", A[:-1], 0), ("b", B, 0)], r"lack 1 bytes of the tensors 'a'"),
        ([("a", A[:5], 0), ("a", A[6:], 6), ("b", B, 0)], r"lack 1 bytes of the tensors 'a'"),
        ([("a", A, 0), ("b", B, 0), ("a", A[7:9], 7)], r"bytes 7 to 9 of tensor 'a' .* twice"),
        ([("b", B[:7], 0), ("a", A, 0), ("b", B[6:], 6)], r"bytes 6 to 7 of tensor 'b' .* twice"),
    ],
)
def test_bytes_that_are_missing_or_were_written_twice_are_named(
    tmp_path: Path, writes: list[tuple[str, bytes, int]], message: str
) -> None:
    with parallel(tmp_path / "f") as pack:
        parts = [part_of(pack, write) for write in writes]
        with pytest.raises(StateError, match=message):
            pack.commit(parts)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_pack_is_told_apart(tmp_path: Path) -> None:
    other = ParallelWriter(tmp_path / "g", SPECS, metadata={"other": "yes"})
    with parallel(tmp_path / "f") as pack, other:
        part = part_of(other, ("a", A, 0), ("b", B, 0))
        with pytest.raises(StateError, match="another pack"):
            pack.commit([part])


def test_a_part_of_an_abandoned_attempt_at_the_same_pack_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with parallel(path) as first:
        stale = part_of(first, ("a", A, 0), ("b", B, 0))
    with parallel(path) as second, pytest.raises(StateError, match="another attempt at this pack"):
        second.commit([stale])
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_two_attempts_at_one_target_at_once_do_not_mix(alone: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    with parallel(path) as one, parallel(path) as other:
        parts = [part_of(pack, ("a", A, 0), ("b", B, 0)) for pack in (one, other)]
        with pytest.raises(StateError, match="another attempt at this pack"):
            one.commit(parts[::-1])
        other.commit(parts[1:])
    assert path.read_bytes() == alone


def test_a_part_given_twice_is_refused(tmp_path: Path) -> None:
    with parallel(tmp_path / "f") as pack:
        part = part_of(pack, ("a", A, 0), ("b", B, 0))
        with pytest.raises(StateError, match="written twice"):
            pack.commit([part, pickle.loads(pickle.dumps(part))])


def write_b(unfinished_path: str) -> Part:
    with PartWriter(unfinished_path) as writer:
        writer.write("b", B)
        return writer.finish()


def test_a_part_may_come_from_another_process_by_another_path(alone: bytes, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    path = tmp_path / "real" / "f"
    with parallel(path) as pack, multiprocessing.get_context("spawn").Pool(1) as pool:
        elsewhere = str(tmp_path / "link" / os.path.basename(pack.unfinished_path))
        pack.commit([pool.apply(write_b, (elsewhere,)), part_of(pack, ("a", A, 0))])
    assert path.read_bytes() == alone


@pytest.mark.parametrize("committed", [True, False])
def test_a_writer_of_a_part_ends_with_its_pack(alone: bytes, committed: bool, tmp_path: Path) -> None:
    path = tmp_path / "f"
    with parallel(path) as pack:
        late = PartWriter(pack.unfinished_path)
        late.write("b", B[:2])
        if committed:
            pack.commit([part_of(pack, ("a", A, 0), ("b", B, 0))])
    for action in (late.finish, lambda: late.write("a", bytes(5))):
        with pytest.raises(StateError, match="committed or abandoned"):
            action()
    late.close()
    assert not committed or path.read_bytes() == alone


@pytest.mark.parametrize(("name", "begin"), [(3, 0), (None, 0), ("b", "0"), ("b", 1.0)])
def test_a_name_that_is_no_text_and_a_place_that_is_no_number_are_refused(
    name: object, begin: object, tmp_path: Path
) -> None:
    with (
        parallel(tmp_path / "f") as pack,
        PartWriter(pack.unfinished_path) as writer,
        pytest.raises(OptionError, match="expected"),
    ):
        writer.write(name, b"", begin=begin)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [None, 3, [None], ["part"]])
def test_what_is_not_a_part_is_refused(parts: object, tmp_path: Path) -> None:
    with parallel(tmp_path / "f") as pack, pytest.raises(OptionError, match="expected"):
        pack.commit(parts)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (("c", b"", 0), UnknownTensorError, r"no tensor 'c'"),
        (("b", B, 1), SourceError, r"'b' has 12 bytes, too few for the chunks from byte 1 on"),
        (("b", b"", 13), SourceError, r"no range can begin at byte 13"),
        (("b", b"", -1), SourceError, r"no range can begin at byte -1"),
        (("none", b"x", 0), SourceError, r"'none' has 0 bytes"),
    ],
)
def test_a_write_outside_the_tensor_is_refused_and_its_part_with_it(
    tmp_path: Path, write: tuple[str, bytes, int], error: type[StreamPackError], message: str
) -> None:
    name, data, begin = write
    with parallel(tmp_path / "f") as pack, PartWriter(pack.unfinished_path) as writer:
        with pytest.raises(error, match=message):
            writer.write(name, data, begin=begin)
        with pytest.raises(StateError, match="an earlier write failed"):
            writer.finish()
        with pytest.raises(StateError, match="an earlier write failed"):
            writer.write("b", B)


def test_an_error_of_the_caller_passes_unchanged(tmp_path: Path) -> None:
    with parallel(tmp_path / "f") as pack, PartWriter(pack.unfinished_path) as writer:
        with pytest.raises(ZeroDivisionError):
            writer.write("b", (bytes(1 // zero) for zero in [0]))
        with pytest.raises(StateError):
            writer.finish()


def test_a_closed_part_takes_nothing_more(tmp_path: Path) -> None:
    with parallel(tmp_path / "f") as pack:
        with PartWriter(pack.unfinished_path) as writer:
            writer.finish()
        for action in (writer.finish, lambda: writer.write("b", B)):
            with pytest.raises(StateError, match="closed"):
                action()
        writer.close()


def test_a_part_needs_a_pack_that_was_begun(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PartWriter(tmp_path / "missing")
    (tmp_path / "text").write_text("no pack, whatever it may be")
    with pytest.raises(FormatError, match="not a pack"):
        PartWriter(tmp_path / "text")


def test_bad_specs_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTensorError, match="'a' has dtype 'text'"):
        ParallelWriter(tmp_path / "f", {"a": ("text", ())})
    with pytest.raises(LimitError, match="blocks of 3 bytes"):
        ParallelWriter(tmp_path / "f", SPECS, block_nbytes=3)
    assert list(tmp_path.iterdir()) == []


def test_a_block_is_read_back_only_where_no_write_held_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []
    read_back = ParallelWriter._read_back

    def noting(pack: ParallelWriter, stream: object, block: int) -> int:
        blocks.append(block)
        return read_back(pack, stream, block)  # type: ignore[arg-type]

    monkeypatch.setattr(ParallelWriter, "_read_back", noting)
    with parallel(tmp_path / "f") as pack:
        cut = BLOCK + 1
        pack.commit([part_of(pack, ("a", A[:cut], 0), ("a", A[cut:], cut), ("b", B, 0))])
    assert blocks == [1]


def test_a_finished_pack_takes_no_parts_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    stream_pack.save_file({"w": np.ones(4, np.uint8)}, path)
    before = path.read_bytes()
    with pytest.raises(FormatError, match=r"'.*pack' is a complete pack"):
        PartWriter(path)
    assert path.read_bytes() == before
