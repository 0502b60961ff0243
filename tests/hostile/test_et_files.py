"""Files of ExecuTorch's that were made, or cut, to harm: an error of ours, and nothing outside the file."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import chain, product
from pathlib import Path

import pytest

import stream_pack
from stream_pack import (
    FormatError,
    NotAPackError,
    RawPayloadError,
    SourceChecksumError,
    TruncatedError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from stream_pack.et_files.survey import Survey, survey_payload, survey_program
from stream_pack.inspection.inspect import inspect
from stream_pack.reader.verify import verify
from tests.et_files.test_survey import Bytes
from tests.sources.byte_sources import Dribble
from tests.support.damage import Share, check_each, cut, flipped, may_refuse, some_or_all
from tests.support.et_files import Constant, Delegate, Named, mps_payload, program, ptd
from tests.support.et_files import xnnpack_payload as xnnpack

VECTORS = Path(__file__).parent.parent / "vectors" / "executorch"
SMALL = [
    "mps/FAULT_views_int32.mp00",
    "xnnpack/tied_fp32.0.inline.xh00",
    "xnnpack/tied_fp32.pte",
    "programs/mutable.pte",
    "programs/inline.pte",
    "ptd/mlp_portable.ptd",
]
MEMORY = 10 << 20


def head_nbytes(name: str, data: bytes) -> int:
    """Bytes in front of data that means nothing to a parser."""
    return min(len(data), 640 if name.endswith(".ptd") else 4608)


def survey(data: bytes) -> Survey:
    read = survey_program if data[4:8] == b"ET12" else survey_payload
    return read(Bytes(data))


UNCONVERTIBLE = (
    FormatError,
    NotAPackError,
    SourceChecksumError,
    TruncatedError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)


def assert_survives(data: bytes) -> None:
    """The survey ends with an error of ours, or everything it found lies inside the file."""
    with may_refuse(FormatError, TruncatedError):
        found = survey(data)
        begins, nbytes = found.constants.file_offsets, found.constants.nbytes
        assert not len(begins) or int(begins.min()) >= 0
        assert not len(begins) or int((begins + nbytes).max()) <= len(data)


def assert_all_survive(data: bytes, path: Path) -> None:
    """The same of everything that reads such files."""
    path.write_bytes(data)
    with may_refuse(FormatError, NotAPackError, TruncatedError):
        description = inspect(path)
        if description is not None:
            assert sum(part.nbytes for part in description.parts) == len(data)
            description.to_text()
    with may_refuse(NotAPackError, RawPayloadError):
        verify(path)
    for source in (path, Dribble(data, step=1 << 20)):
        with may_refuse(*UNCONVERTIBLE):
            stream_pack.convert(source, io.BytesIO(), spool_dir=path.parent, jobs=1)


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more than 10 MiB are allocated."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def places(name: str, data: bytes, *, step: int = 1) -> list[int]:
    """All of the header, and places behind it: every third of a payload or .ptd, every eleventh of a program."""
    each = 11 if name.endswith(".pte") else 3
    return [*range(0, 64, step), *range(64, head_nbytes(name, data), each * step)]


def with_numbers(
    data: bytes, places: Iterable[int], values: Iterable[int], share: Share, seed: str
) -> Iterator[tuple[str, bytes]]:
    """Copies of ``data`` with one of its u64 replaced, and which."""
    for place, value in share.of(product(places, values), seed):
        changed = bytearray(data)
        struct.pack_into("<Q", changed, place, value)
        yield f"{value:#x} at {place}", bytes(changed)


@some_or_all(5)
@pytest.mark.parametrize("name", SMALL)
def test_flipped_bytes(name: str, share: Share) -> None:
    data = (VECTORS / name).read_bytes()
    check_each(flipped(data, places(name, data), share=share, seed=name), assert_survives)


@some_or_all(5)
@pytest.mark.parametrize("name", SMALL)
def test_truncations(name: str, share: Share) -> None:
    data = (VECTORS / name).read_bytes()
    lengths = share.of((max(nbytes, 8) for nbytes in places(name, data)), name)
    check_each(cut(data, lengths), assert_survives)


EDGES = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@some_or_all(5)
@pytest.mark.parametrize("name", SMALL)
def test_numbers_at_every_edge(name: str, share: Share) -> None:
    # ET#19268, ET#19285: sums that wrap
    data = (VECTORS / name).read_bytes()
    values = (*EDGES[2:], len(data), len(data) + 1)
    changed = with_numbers(data, places(name, data[:-8], step=8), values, share, name)
    check_each(changed, assert_survives)


@some_or_all(5)
@pytest.mark.parametrize("name", SMALL)
def test_all_that_reads_them_survives_them(name: str, share: Share, tmp_path: Path) -> None:
    data = (VECTORS / name).read_bytes()
    end = head_nbytes(name, data)
    tried = [*range(8, 40, 8), *range(40, end - 8, end // 8)]
    changed = with_numbers(data, tried, (2**32, 2**64 - 1), share, name)
    check_each(
        chain(changed, cut(data, share.of(tried, name))), lambda data: assert_all_survive(data, tmp_path / "file")
    )


def test_positions_that_wrap_are_refused_in_every_record(bounded: None) -> None:
    for offset in (*EDGES, 17):
        for nbytes in EDGES:
            wraps = Constant((4,), offset, nbytes=nbytes)
            payload = mps_payload([wraps], bytes(16))
            assert_survives(payload)
            assert_survives(xnnpack([Constant((4,), offset, nbytes=nbytes, datatype=1)], bytes(16)))
            named = [Named("a", 0, 6, (4,), (0,))]
            assert_survives(ptd(named, [(offset, nbytes)], region=512, region_nbytes=16) + bytes(16))
            assert_survives(program([Delegate(0)], [(offset, nbytes)], base=512, segments_nbytes=0) + payload)


def test_dims_whose_product_wraps_are_told(bounded: None) -> None:
    for dims in ((2**31 - 1,) * 3, (2**31 - 1, 2**31 - 1, 4, 0), (65536,) * 4, (-1, -1), (1,) * 64):
        found = survey(mps_payload([Constant(dims, 0, nbytes=0)], bytes(16)))
        assert found.faults


def test_a_small_file_cannot_ask_for_large_memory(bounded: None) -> None:
    # What many refer to is read for each of them: a key of 4,000 bytes, 500 delegates.
    names = ptd([Named("k" * 4000, 0)] * 5000, [(0, 16)], region=1 << 18, region_nbytes=16)
    with pytest.raises(FormatError, match="5000|20000000"):
        survey(names + bytes(16))
    delegates = [Delegate(0)] * 500
    methods = program(delegates, [(0, 16)], base=1 << 16, segments_nbytes=16, methods=2000)
    with pytest.raises(FormatError, match="1000000 elements"):
        survey(methods + bytes(16))


def test_payloads_that_overlap_are_not_each_read_anew(bounded: None) -> None:
    # 400 delegates, for each of which 400 constants would be found.
    payload = mps_payload([Constant((4,), 0)] * 400, bytes(16))
    segments = [(0, len(payload) + more) for more in range(400)]
    delegates = [Delegate(number) for number in range(400)]
    head = program(delegates, segments, base=1 << 16, segments_nbytes=len(payload) + 400)
    found = survey(head + payload + bytes(400))
    assert len(found.constants) == 400
    assert [(fault.part, fault.fatal) for fault in found.faults] == [("segment", True)] * 399
    assert "'forward/1' overlaps" in found.faults[0].text


@pytest.mark.parametrize("what", ["method", "backend"])
def test_a_long_name_is_not_told_with_every_constant(what: str, bounded: None) -> None:
    payload = mps_payload([Constant((4,), 0)] * 200, bytes(16))
    for nbytes, sound in ((1024, True), (1025, False), (200_000, False)):
        name = "f" * nbytes
        method, backend = (name, "MPSBackend") if what == "method" else ("forward", name)
        head = program(
            [Delegate(0, backend)], [(0, len(payload))], base=1 << 18, segments_nbytes=len(payload), method=method
        )
        if sound:
            assert len(survey(head + payload).constants) == 200
        else:
            with pytest.raises(FormatError, match=f"a name of {nbytes} bytes"):
                survey(head + payload)


def test_segments_of_mutable_data_are_few() -> None:
    # Each is compared with every tensor.
    for count, sound in ((1024, True), (1025, False)):
        data = program([], [(0, 16)], base=8192, segments_nbytes=16, mutable=count) + bytes(16)
        if sound:
            assert not survey(data).faults
        else:
            with pytest.raises(FormatError, match="1025 segments of mutable data"):
                survey(data)


def test_a_fault_quotes_the_names_of_the_file_and_stays_short() -> None:
    payload = mps_payload([Constant((4,), 0), Constant((4,), 8)], bytes(24))
    method, key = "\x1b[2J\n" + "f" * 1000, "\x1b[2J\n" + "k" * 4000
    data = program(
        # Overlapping payloads, one that is cut, and one in a segment that is not there.
        [Delegate(0), Delegate(1), Delegate(2), Delegate(9)],
        [(0, len(payload)), (8, len(payload)), (len(payload) + 8, 24), (0, 0)],
        named=[Named(key, 7), Named(key, 3), Named(key, 3)],
        base=1 << 16,
        segments_nbytes=len(payload) + 32,
        method=method,
    )
    faults = survey(data + payload + payload[:32]).faults
    assert {fault.part for fault in faults} == {"constant", "graph", "names", "segment"}
    for fault in faults:
        assert "\\x1b[2J\\n" in fault.text
        assert fault.text.isprintable()
        assert len(fault.text) < 700
