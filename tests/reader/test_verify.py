"""verify finds all damage, wherever it is, and says whose bytes it hits; lazy verification stops it at the door."""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack import (
    ChecksumError,
    FormatError,
    LimitError,
    NewerVersionError,
    NotAPackError,
    OptionError,
    RawPayloadError,
    TruncatedError,
)
from stream_pack.format import proof
from stream_pack.format.proof import Users, Wrong, wrong_blocks
from stream_pack.reader.verify import VerifyReport, verify
from tests.support.damage import Share, may_refuse, some_or_all
from tests.support.packs import BLOCK_NBYTES, FOOTER, pack_bytes, places, reseal, tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pack"


@pytest.fixture
def data(path: Path) -> bytes:
    return pack_bytes(path)


def found(path: Path, data: bytes, *flips: int) -> VerifyReport:
    changed = bytearray(data)
    for place in flips:
        changed[place] ^= 0x10
    path.write_bytes(changed)
    return verify(path, jobs=2)


def offset_of(path: Path, name: str) -> int:
    with stream_pack.open(path) as pack:
        return pack[name].file_offset


def test_a_whole_pack_has_no_damage(path: Path, data: bytes) -> None:
    report = verify(path)
    assert report.ok
    assert report.complete
    assert report.damages == ()
    assert report.tensors == 7
    # embed (with head and rows in it), norm, step, flags: 12288, 14, 8 and 3 bytes in blocks of 4096
    assert (report.blocks, report.nbytes) == (6, 12313)
    report.raise_if_damaged()


@some_or_all(97)
def test_every_flipped_byte_is_detected(path: Path, share: Share) -> None:
    """Every byte that is not zero; and of the zeros, nearly all of which are padding, the share."""
    # ST#220, PT#126952: header, metadata, padding, data, checksums, footer: all of it, one at a time
    pack_bytes(path, {"a": torch.arange(8.0), "b": torch.tensor(3)}, metadata={"k": "v"})
    data = path.read_bytes()
    zeros = [place for place, byte in enumerate(data) if not byte]
    undetected = []
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for place in {*range(len(data))}.difference(zeros).union(share.of(zeros)):
            memory[place] ^= 1
            with may_refuse(NotAPackError, NewerVersionError):
                if verify(path, jobs=1).ok:
                    undetected.append(place)
            memory[place] ^= 1
    assert undetected == []
    assert verify(path).ok


def test_every_cut_is_damage_of_the_length(path: Path, data: bytes) -> None:
    region = places(data).region
    for nbytes in range(len(data) - 1, 7, -97):
        os.truncate(path, nbytes)
        report = verify(path)
        (damage,) = report.damages
        assert damage.part == "length"
        assert damage.file_begin == nbytes
        assert not report.complete
        if nbytes >= region:
            assert damage.file_end == len(data)
            assert report.tensors == 7
        with pytest.raises(TruncatedError):
            report.raise_if_damaged()


def test_bytes_that_follow_are_damage_and_the_rest_is_still_verified(path: Path, data: bytes) -> None:
    report = found(path, data + b"more", offset_of(path, "step"))
    assert [damage.part for damage in report.damages] == ["block", "length"]
    assert (report.damages[1].file_begin, report.damages[1].file_end) == (len(data), len(data) + 4)


def test_damage_of_a_block_names_every_tensor_that_has_bytes_in_it(path: Path, data: bytes) -> None:
    # Rows 32 to 63 are block 1 of the buffer, exactly.
    place = offset_of(path, "rows") + 5
    report = found(path, data, place)
    (damage,) = report.damages
    assert (damage.part, damage.tensors) == ("block", ("embed", "head", "rows"))
    assert (damage.buffer, damage.block) == (0, 1)
    assert (damage.file_begin, damage.file_end) == (place - 5, place - 5 + BLOCK_NBYTES)
    changed = path.read_bytes()[damage.file_begin : damage.file_end]
    original = data[damage.file_begin : damage.file_end]
    with pytest.raises(ChecksumError, match="'embed'") as caught:
        report.raise_if_damaged()
    assert caught.value.actual == xxhash.xxh3_64_intdigest(changed)
    assert caught.value.expected == xxhash.xxh3_64_intdigest(original)
    assert caught.value.tensors == ("embed", "head", "rows")
    assert found(path, data, place + BLOCK_NBYTES).damages[0].tensors == ("embed", "head")


def test_all_damage_is_listed_in_the_order_of_the_file(path: Path, data: bytes) -> None:
    at = places(data)
    embed, flags = offset_of(path, "embed"), offset_of(path, "flags")
    flips = (embed, embed + 2 * BLOCK_NBYTES, flags + 1, flags + 3, at.region_end - 1, at.region_end, at.footer)
    report = found(path, data, *flips)
    assert [(damage.part, damage.tensors) for damage in report.damages] == [
        ("block", ("embed", "head")),
        ("block", ("embed", "head")),
        ("block", ("flags",)),
        ("padding", ()),
        ("checksums", ()),
    ]
    padding = report.damages[3]
    assert (padding.file_begin, padding.file_end) == (flags + 3, at.region_end)
    begins = [damage.file_begin for damage in report.damages]
    assert begins == sorted(begins)


def test_a_changed_checksum_accuses_the_checksums_and_the_block(path: Path, data: bytes) -> None:
    at = places(data)
    report = found(path, data, at.region_end + 8)
    assert [damage.part for damage in report.damages] == ["block", "checksums"]
    assert report.damages[0].block == 1
    assert (report.damages[1].file_begin, report.damages[1].file_end) == (at.region_end, len(data))


def test_a_damaged_footer_does_not_hide_damaged_blocks(path: Path, data: bytes) -> None:
    report = found(path, data, len(data) - 1, offset_of(path, "step"))
    assert [damage.part for damage in report.damages] == ["block", "footer"]


def test_a_damaged_head_hides_the_rest_and_says_so(path: Path, data: bytes) -> None:
    report = found(path, data, data.index(b"embed"), offset_of(path, "step"))
    assert [damage.part for damage in report.damages] == ["head"]
    assert not report.complete
    with pytest.raises(ChecksumError):
        report.raise_if_damaged()


def test_a_head_on_the_tail_of_another_pack_is_detected(path: Path, tmp_path: Path) -> None:
    first = pack_bytes(path, {"w": torch.zeros(64)}, metadata={"n": "1"})
    # The same layout, bytes and lengths: only the metadata differs.
    second = pack_bytes(tmp_path / "second", {"w": torch.zeros(64)}, metadata={"n": "2"})
    at = places(first)
    assert at == places(second)
    assert first[at.region : at.footer] == second[at.region : at.footer]
    path.write_bytes(first[: at.region] + second[at.region :])
    report = verify(path)
    assert [damage.part for damage in report.damages] == ["checksums"]
    with pytest.raises(ChecksumError, match="another pack"):
        stream_pack.open(path, verify="lazy")


def test_a_graph_that_contradicts_the_index_is_damage_though_all_checksums_agree(path: Path, data: bytes) -> None:
    # Every bit that matters of norm's value in the graph: dims [7], nbytes 14.
    changed = bytearray(data)
    graph_end = places(data).index
    nbytes_field = data.index(struct.pack("<Q", 14), 24, graph_end)
    changed[nbytes_field] = 15
    path.write_bytes(reseal(changed))
    (damage,) = verify(path).damages
    assert (damage.part, damage.tensors) == ("graph", ("norm",))
    # Its rank and dims.
    changed = bytearray(data)
    dims_field = data.index(struct.pack("<II", 1, 7), 24, graph_end)
    changed[dims_field + 4] = 8
    path.write_bytes(reseal(changed))
    (damage,) = verify(path).damages
    assert (damage.part, damage.tensors) == ("graph", ("norm",))
    # No graph at all.
    changed = bytearray(data)
    changed[24:graph_end] = bytes(graph_end - 24)
    path.write_bytes(reseal(changed))
    assert [damage.part for damage in verify(path).damages] == ["graph"]


def test_names_out_of_order_are_damage_though_all_checksums_agree(path: Path) -> None:
    data = bytearray(pack_bytes(path, {"b": torch.zeros(1), "a": torch.zeros(1), "c": torch.zeros(1)}))
    order = data.index(struct.pack("<III", 1, 0, 2))
    data[order : order + 12] = struct.pack("<III", 0, 1, 2)
    path.write_bytes(reseal(data))
    stream_pack.open(path).close()
    (damage,) = verify(path).damages
    assert (damage.part, damage.tensors) == ("names", ("b", "a"))


def test_no_listed_name_is_unknown_whatever_order_a_forged_index_gives(path: Path) -> None:
    count = 9
    data = pack_bytes(path, {f"t{count - number}": torch.tensor(number) for number in range(count)})
    place = data.index(struct.pack(f"<{count}I", *reversed(range(count))))
    generator = random.Random(0)
    refused = 0
    for _ in range(30):
        order = generator.sample(range(count), count)
        changed = bytearray(data)
        struct.pack_into(f"<{count}I", changed, place, *order)
        path.write_bytes(reseal(changed))
        with stream_pack.open(path) as pack:
            for number, name in enumerate(pack):
                try:
                    assert int(pack[name].numpy()) == number
                except FormatError as error:
                    assert str(error).startswith(f"{path}: the index is broken: expected names sorted")  # noqa: PT017
                    refused += 1
            with pytest.raises(FormatError, match="expected names sorted"):
                "another" in pack  # noqa: B015 - it might be there, and not be found
    assert refused


def test_a_name_twice_is_damage_though_all_checksums_agree(path: Path) -> None:
    data = bytearray(pack_bytes(path, {"aa": torch.zeros(1), "ab": torch.zeros(1)}))
    place = data.index(b"aaab")
    data[place : place + 4] = b"aaaa"
    path.write_bytes(reseal(data))
    (damage,) = verify(path).damages
    assert (damage.part, damage.tensors) == ("names", ("aa", "aa"))


def test_notes_out_of_order_are_damage_though_all_checksums_agree(path: Path) -> None:
    data = bytearray(pack_bytes(path, {}, metadata={"a": "1", "b": "2"}))
    place = data.index(b"a1b2")
    data[place : place + 4] = b"b1a2"
    path.write_bytes(reseal(data))
    (damage,) = verify(path).damages
    assert damage.part == "notes"


def test_bytes_of_a_buffer_that_no_tensor_has_are_damage(path: Path, data: bytes) -> None:
    at = places(data)
    changed = bytearray(data)
    # The buffers' nbytes: embed, norm, step, flags.  One more byte for the last, with its checksum.
    place = data.index(struct.pack("<4Q", 12288, 14, 8, 3), at.index, at.index_end)
    changed[place + 24] = 4
    flags = offset_of(path, "flags")
    checksum = xxhash.xxh3_64_intdigest(data[flags : flags + 4])
    struct.pack_into("<Q", changed, at.footer - 8, checksum)
    path.write_bytes(reseal(changed))
    (damage,) = verify(path).damages
    assert (damage.part, damage.buffer) == ("buffers", 3)
    assert (damage.file_begin, damage.file_end) == (flags, flags + 4)


def test_padding_in_the_head_must_be_zero_though_all_checksums_agree(path: Path, data: bytes) -> None:
    at = places(data)
    for place in (at.index_end, at.locator - 1):
        changed = bytearray(data)
        changed[place] = 1
        path.write_bytes(reseal(changed))
        (damage,) = verify(path).damages
        assert (damage.part, damage.file_begin, damage.file_end) == ("padding", place, place + 1)


def test_what_is_no_pack_is_an_error_and_not_damage(path: Path, data: bytes) -> None:
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(NotAPackError, match="GGUF"):
        verify(path)
    changed = bytearray(pack_bytes(path, {"w": torch.ones(3)}))
    changed[places(changed).region - 1] ^= 1
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(RawPayloadError):
        verify(path)
    with pytest.raises(FileNotFoundError):
        verify(path.parent / "nothing")


def test_an_open_pack_verifies_itself_while_views_live(path: Path, data: bytes) -> None:
    with stream_pack.open(path) as pack:
        held = pack["embed"].torch()
        held.zero_()  # not the file
        assert pack.verify(jobs=2).ok
    with pytest.raises(ChecksumError, match="'step'"):
        place = offset_of(path, "step")
        path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        stream_pack.open(path, verify="full")


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_progress_ends_at_all_bytes_whatever_the_number_of_threads(jobs: int, path: Path) -> None:
    pack_bytes(path, {f"t{n}": torch.full((3000,), n) for n in range(300)})
    seen: list[tuple[int, int]] = []
    report = verify(path, jobs=jobs, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.blocks == 300 * 6
    assert seen == sorted(seen)
    assert seen[-1] == (300 * 24_000, 300 * 24_000)
    assert len(seen) > 1


def test_the_report_is_json(path: Path, data: bytes) -> None:
    report = found(path, data, offset_of(path, "step"))
    decoded = json.loads(json.dumps(report.to_json()))
    assert decoded["ok"] is False
    (damage,) = decoded["damages"]
    assert damage["tensors"] == ["step"]
    assert damage["message"] == report.damages[0].message
    place = damage["file_begin"]
    assert int(damage["expected"], 16) == xxhash.xxh3_64_intdigest(data[place : place + 8])


# Lazy verification.


def test_lazy_verification_refuses_the_damaged_tensor_and_no_other(path: Path, data: bytes) -> None:
    # ST#220
    place = offset_of(path, "norm")
    path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    with stream_pack.open(path, verify="lazy") as pack:
        view = pack["norm"]
        for touch in (view.numpy, view.torch, view.raw, view.materialize, lambda: view.numpy(writable=True)):
            with pytest.raises(ChecksumError, match="'norm'") as caught:
                touch()
            assert str(path) in str(caught.value)
            assert (caught.value.part, caught.value.tensors) == ("block", ("norm",))
        for name, tensor in tensors().items():
            if name != "norm":
                assert torch.equal(pack[name].torch(), tensor)


def test_lazy_verification_of_a_slice_looks_at_its_blocks_only(path: Path, data: bytes) -> None:
    place = offset_of(path, "embed") + 2 * BLOCK_NBYTES + 17  # row 64
    path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    with stream_pack.open(path, verify="lazy") as pack:
        expected = tensors()["embed"]
        assert torch.equal(pack.get_slice("embed")[0:64].torch(), expected[0:64])
        assert torch.equal(pack["rows"].torch(), expected[32:64])
        for damaged in (slice(63, 65), slice(95, 96), slice(None)):
            with pytest.raises(ChecksumError):
                pack.get_slice("embed")[damaged].numpy()
        # A tensor of the same buffer that is whole may be had though the buffer is not.
        assert torch.equal(pack["rows"].torch(), expected[32:64])


def test_lazy_verification_reads_each_block_once(path: Path, data: bytes) -> None:
    with stream_pack.open(path, verify="lazy") as pack:
        pack["embed"].numpy()
        place = pack["embed"].file_offset
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\xff\xff\xff\xff")
        assert np.isnan(pack["head"].numpy()[0, 0])


def test_lazy_verification_trusts_no_checksum_that_the_footer_does_not_cover(path: Path, data: bytes) -> None:
    at = places(data)
    place = offset_of(path, "step")
    changed = bytearray(data)
    changed[place] ^= 1
    # The checksum of the changed block in place, but not the root's.
    block = xxhash.xxh3_64_intdigest(bytes(changed[place : place + 8]))
    struct.pack_into("<Q", changed, at.region_end + 8 * 4, block)
    path.write_bytes(changed)
    with pytest.raises(ChecksumError, match="checksums"):
        stream_pack.open(path, verify="lazy")
    with stream_pack.open(path) as pack:  # never: as asked for
        assert int(pack["step"].numpy()) != 7
    struct.pack_into("<Q", changed, len(data) - FOOTER.size, 0)
    path.write_bytes(reseal(changed))
    with stream_pack.open(path, verify="lazy") as pack:
        pack["step"].numpy()


def test_a_footer_that_does_not_fill_its_place_is_damage(path: Path, data: bytes) -> None:
    at = places(data)
    changed = bytearray(data[: at.footer] + bytes(8) + data[at.footer :])
    struct.pack_into("<Q", changed, at.locator + 16, len(changed))
    path.write_bytes(reseal(changed))
    with pytest.raises(FormatError, match="the footer claims 24 bytes, expected 32"):
        stream_pack.open(path)
    assert [damage.part for damage in verify(path).damages] == ["footer"]


def test_a_pack_that_lies_about_checksums_but_agrees_with_itself_is_a_format_error(path: Path, data: bytes) -> None:
    changed = bytearray(data)
    changed[places(data).footer + 8] = 32  # nbytes of the footer's record
    path.write_bytes(reseal(changed))
    with pytest.raises(FormatError):
        stream_pack.open(path)
    assert [damage.part for damage in verify(path).damages] == ["footer"]


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], set[int]]:
    """Makes that many tasks of a verification wait for each other; returns the threads that then came to work."""

    def arrange(parties: int) -> set[int]:
        barrier = threading.Barrier(parties, timeout=60)
        threads: set[int] = set()

        def meet(*arguments: Any) -> list[tuple[int, Wrong]]:
            threads.add(threading.get_ident())
            barrier.wait()  # a pool of fewer threads never gets past it
            return wrong_blocks(*arguments)

        monkeypatch.setattr("stream_pack.reader.verify.wrong_blocks", meet)
        return threads

    return arrange


@pytest.fixture
def five_tasks(tmp_path: Path) -> Path:
    """A pack of 5 x 1024 blocks: so many does a thread hash in one go."""
    content = {"w": torch.arange(5 * 1024 * BLOCK_NBYTES // 4, dtype=torch.int32)}
    pack_bytes(tmp_path / "five", content)
    return tmp_path / "five"


def test_verification_uses_all_cores_that_the_process_may_use(
    five_tasks: Path, meeting: Callable[[int], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As under taskset, or in a container: not what the machine has.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 5, 6, 9}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    threads = meeting(5)
    assert verify(five_tasks).ok
    assert len(threads) == 5
    assert threading.get_ident() not in threads


def test_where_no_affinity_is_known_verification_uses_all_cores(
    five_tasks: Path, meeting: Callable[[int], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    threads = meeting(5)
    with stream_pack.open(five_tasks) as pack:
        assert pack.verify().ok
    assert len(threads) == 5


def test_one_job_is_done_by_the_calling_thread(five_tasks: Path, meeting: Callable[[int], set[int]]) -> None:
    threads = meeting(1)
    assert verify(five_tasks, jobs=1).ok
    assert threads == {threading.get_ident()}


def test_as_many_threads_work_as_there_are_jobs(
    five_tasks: Path, meeting: Callable[[int], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    threads = meeting(5)
    assert verify(five_tasks, jobs=5).ok
    assert len(threads) == 5


def test_a_footer_of_a_newer_version_is_no_damage_but_not_for_this_reader(path: Path, data: bytes) -> None:
    changed = bytearray(data)
    changed[places(data).footer + 12] = 2  # its version
    path.write_bytes(reseal(changed))
    for door in (stream_pack.open, verify):
        with pytest.raises(NewerVersionError, match="footer version 2") as caught:
            door(path)
        assert (caught.value.version, caught.value.supported) == (2, 1)


def test_a_report_on_tied_tensors_does_not_list_all_of_them_for_every_block(path: Path) -> None:
    tied = torch.zeros(200 * BLOCK_NBYTES, dtype=torch.uint8)
    data = bytearray(pack_bytes(path, {f"t{number:03}": tied for number in range(300)}))
    at = places(data)
    data[at.region : at.region_end] = b"x" * (at.region_end - at.region)
    path.write_bytes(data)
    report = verify(path)
    assert len(report.damages) == 200
    first = report.damages[0]
    assert first.tensors == tuple(f"t{number:03}" for number in range(100))
    assert first.tensor_count == 300
    assert "tensor 't000', 't001', 't002' and 297 more: block 0 of" in first.message
    assert first.to_json()["tensor_count"] == 300
    # Once in memory, however many blocks there are.
    assert {id(damage.tensors) for damage in report.damages} == {id(first.tensors)}


@given(
    extents=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=30),
    begin=st.integers(0, 40),
    nbytes=st.integers(1, 8),
)
def test_the_tensors_of_a_range_are_those_that_have_bytes_in_it(
    extents: list[tuple[int, int]], begin: int, nbytes: int
) -> None:
    extents = [(0, 1), *extents]
    lengths = np.array([length for _, length in extents])
    index: Any = SimpleNamespace(
        tensor_buffers=np.where(lengths > 0, 0, 2**32 - 1).astype(np.uint32),
        offsets=np.array([offset for offset, _ in extents]),
        tensor_nbytes=lengths,
        name=str,
    )
    wanted = {
        str(number)
        for number, (offset, length) in enumerate(extents)
        if set(range(offset, offset + length)) & set(range(begin, begin + nbytes))
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_STRIDE", 3)
        for most in (100, 2):
            patch.setattr(proof, "MAX_NAMED", most)
            names, count = Users(index).of(begin, begin + nbytes)
            assert count == len(wanted)
            assert len(names) == len(set(names)) == min(most, count)
            assert set(names) <= wanted


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_jobs_are_a_mistake_of_the_caller(path: Path, data: bytes, jobs: int) -> None:
    with pytest.raises(LimitError, match="expected at least 1"):
        verify(path, jobs=jobs)
    with stream_pack.open(path) as pack, pytest.raises(LimitError):
        pack.verify(jobs=jobs)
    with pytest.raises(OptionError, match="jobs=1.5: expected a whole number"):
        verify(path, jobs=1.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="offset=-1"):
        verify(path, offset=-1)


def test_the_report_says_which_file_and_which_pack_and_how_long_it_took(
    path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with stream_pack.open(path.name) as pack:
        reports = [verify(path.name), pack.verify()]
        for report in reports:
            assert (report.path, report.checksum) == (path.name, pack.checksum)
            assert report.seconds > 0
    told = json.loads(json.dumps(reports[0].to_json()))
    (root,) = struct.unpack_from("<Q", data, places(data).footer)
    assert (told["path"], told["checksum"], told["nbytes"]) == (path.name, f"{root:016x}", 12313)
    # A root checksum that is wrong is not passed on.
    assert found(path, data, places(data).region_end).checksum is None


@pytest.mark.parametrize("progress", [3, "bar"])
def test_progress_that_cannot_be_called_is_a_mistake_of_the_caller(path: Path, data: bytes, progress: Any) -> None:
    with pytest.raises(OptionError, match="progress="):
        verify(path, progress=progress)
    with stream_pack.open(path) as pack, pytest.raises(OptionError, match="progress="):
        pack.verify(progress=progress)


def test_a_damaged_head_ends_where_the_region_begins(path: Path, data: bytes) -> None:
    at = places(data)
    (damage,) = found(path, data, at.index + 8).damages
    assert (damage.part, damage.file_begin, damage.file_end) == ("head", 0, at.region)
    (damage,) = found(path, data, at.region - 1).damages  # the locator's magic
    assert (damage.part, damage.file_begin, damage.file_end) == ("head", 0, at.region)
