"""Bytes that a streamed export keeps on disk, and the placeholders that stand for them."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_pack.errors import OptionError, StateError, TruncatedSourceError, UnsupportedTensorError
from stream_pack.executorch.export.held import Held, Holder
from stream_pack.executorch.export.placeholder import HeldBytes, held_in
from stream_pack.executorch.export.session import Export, activate
from stream_pack.executorch.export.tensors import hold_tensor
from stream_pack.pipeline.chunks import Zeros

MIB = 1 << 20


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    return Holder(tmp_path, chunk_nbytes=MIB)


def content(nbytes: int, seed: int = 1) -> bytes:
    return hashlib.shake_128(bytes([seed])).digest(nbytes)


def pieces(data: bytes, nbytes: int) -> Iterator[bytes]:
    return (data[begin : begin + nbytes] for begin in range(0, len(data), nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 100_003])
@pytest.mark.parametrize("chunk", [1, 7, 4096, 200_000])
def test_what_is_held_comes_back_whatever_the_chunks(holder: Holder, nbytes: int, chunk: int) -> None:
    data = content(nbytes)
    held = holder.hold(pieces(data, chunk), nbytes, sha256=True)
    assert held.read(0, nbytes) == data
    assert b"".join(held.chunks(chunk_nbytes=chunk)) == data
    assert held.digest == xxhash.xxh3_128_digest(data)
    assert held.sha256_digest() == hashlib.sha256(data).digest()


def test_a_digest_that_was_not_asked_for_is_made_from_the_disk(holder: Holder) -> None:
    data = content(5000)
    assert holder.hold([data], 5000).sha256_digest() == hashlib.sha256(data).digest()


def test_the_checksums_are_those_of_a_pack_s_blocks(holder: Holder) -> None:
    data = content(9 * MIB)
    blocks = [xxhash.xxh3_64_intdigest(block) for block in pieces(data, 4 * MIB)]
    assert list(holder.hold(pieces(data, 1_000_003), 9 * MIB).block_checksums) == blocks


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(
        st.one_of(
            st.binary(max_size=50), st.integers(0, 9000).map(Zeros), st.integers(4096, 9000).map(lambda n: ("held", n))
        ),
        max_size=6,
    ),
    span=st.tuples(st.integers(0, 60_000), st.integers(0, 60_000)),
)
def test_a_composition_reads_as_its_members_joined(members: list[object], span: tuple[int, int]) -> None:
    holder = Holder(tempfile.gettempdir(), chunk_nbytes=MIB)
    expected = b""
    parts: list[Held | bytes | Zeros] = []
    for member in members:
        if isinstance(member, tuple):
            data = content(member[1], len(parts))
            parts.append(holder.hold([data], len(data)))
        else:
            assert isinstance(member, (bytes, Zeros))
            data = bytes(member.nbytes) if isinstance(member, Zeros) else member
            parts.append(member)
        expected += data
    held = Held.compose(parts)
    assert held.nbytes == len(expected)
    assert held.read(0, held.nbytes) == expected
    begin, end = (min(place, held.nbytes) for place in sorted(span))
    assert held.read(begin, end) == expected[begin:end]


def test_compositions_differ_by_digest_where_their_content_does(holder: Holder) -> None:
    one, other = (holder.hold([content(5000, seed)], 5000) for seed in (1, 2))
    compositions: list[list[Held | bytes | Zeros]] = [
        [one, other],
        [other, one],
        [one],
        [one, b"x"],
        [one, Zeros(1)],
        [b"\0", one],
    ]
    digests = {Held.compose(members).digest for members in compositions}
    assert len(digests) == 6
    again = [holder.hold([content(5000, seed)], 5000) for seed in (1, 2)]
    assert Held.compose(again).digest == Held.compose([one, other]).digest


def test_a_full_disk_is_said_with_the_folder_the_constant_and_what_is_there(tmp_path: Path) -> None:
    # A process of its own, whose files may have 64 KiB: torch's or pytest's must not be cut.
    script = """
import os, resource, signal, sys
from stream_pack.executorch.export.held import Holder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
holder = Holder(os.path.join(".", "held"), chunk_nbytes=1 << 20)
holder.hold_memory(memoryview(bytes(40960)), label="the constant 'first'")
try:
    holder.hold_memory(memoryview(bytes(40960)), label="the constant 'second'")
except OSError as error:
    print(error.errno, error.filename)
    print(error.strerror)
"""
    (tmp_path / "held").mkdir()
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    place, text = done.stdout.splitlines()
    assert place == f"{errno.EFBIG} ./held"
    assert text == (
        f"{os.strerror(errno.EFBIG)}: the constant 'second' of 40.0 KiB could not be written to the folder of "
        "streaming_constants, which holds 40.0 KiB of the export already and needs room for all of its constants"
    )


@pytest.mark.parametrize("folder", ["missing", "missing/further", "file"])
def test_a_folder_that_is_none_is_named_as_it_was_given(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="directory") as caught:
        Holder(folder, chunk_nbytes=MIB)
    assert caught.value.filename == folder
    assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)


@pytest.mark.parametrize("folder", ["", "s3://bucket/folder", 3])
def test_a_folder_that_is_no_path_is_refused(folder: Any) -> None:
    with pytest.raises(OptionError, match="folder"):
        Holder(folder, chunk_nbytes=MIB)


def test_fewer_or_more_bytes_than_announced_are_refused(holder: Holder) -> None:
    for came in (4999, 5001):
        with pytest.raises(StateError, match="5000 bytes gave"):
            holder.hold(pieces(content(came), 1000), 5000)


def test_the_file_has_no_name_and_is_closed_with_the_last_that_needs_it(tmp_path: Path) -> None:
    def open_in_folder() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path) in os.readlink(link) for link in links if link.is_symlink())

    holder: Holder | None = Holder(tmp_path, chunk_nbytes=MIB)
    assert holder is not None
    held = HeldBytes(Held.compose([holder.hold([content(5000)], 5000), b"tail"]))
    holder = None
    gc.collect()
    assert os.listdir(tmp_path) == []
    assert open_in_folder() == 1
    assert bytes(held) == content(5000) + b"tail"
    del held
    gc.collect()
    assert open_in_folder() == 0


def test_a_process_that_was_forked_off_does_not_write_over_ours(holder: Holder) -> None:
    before = holder.hold([content(5000)], 5000)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.read(reader, 1)  # until we have written
        theirs = holder.hold([content(5000, seed=2)], 5000)
        right = (content(5000), content(5000, seed=2))
        os._exit((before.read(0, 5000), theirs.read(0, 5000)) != right)
    ours = holder.hold([content(5000, seed=3)], 5000)
    os.write(writer, b"1")
    _, status = os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert status == 0
    assert ours.read(0, 5000) == content(5000, seed=3)


def test_a_file_that_was_cut_is_an_error(holder: Holder) -> None:
    held = holder.hold([content(9000)], 9000)
    os.truncate(held.fragments[0].file.fileno(), 5000)  # type: ignore[union-attr]
    with pytest.raises(TruncatedSourceError, match="ended at byte 5000"):
        held.read(0, 9000)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(30_000.0).reshape(100, 300),
        torch.arange(30_000.0).reshape(100, 300).T,
        torch.arange(30_000.0).reshape(100, 300)[10:20, 5:],
        torch.arange(30_000).reshape(100, 300)[::3, ::2],
        torch.randn(3, 4, 500).permute(2, 0, 1),
        torch.randn(1, 50).expand(40, 50),
        torch.tensor(3.5),
        torch.randn(50).to(torch.complex64).conj(),
        torch.randn(5000, dtype=torch.float64),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_a_tensor_is_held_as_its_elements_in_row_major_order(holder: Holder, tensor: torch.Tensor) -> None:
    def elements(of: torch.Tensor) -> bytes:
        return of.contiguous().resolve_conj().numpy().tobytes()

    held = hold_tensor(holder, tensor, name="w")
    assert held.read(0, held.nbytes) == elements(tensor)
    if not tensor.is_complex():
        held = hold_tensor(holder, tensor, name="w", dtype=torch.float16)
        assert held.read(0, held.nbytes) == elements(tensor.to(torch.float16))


def test_casting_many_elements_takes_them_in_chunks(tmp_path: Path) -> None:
    tensor = torch.randn(700, 1100)
    held = hold_tensor(Holder(tmp_path, chunk_nbytes=65_536), tensor, name="w", dtype=torch.float16)
    assert held.read(0, held.nbytes) == tensor.half().numpy().tobytes()


def test_a_tensor_without_bytes_is_refused_by_name(holder: Holder) -> None:
    with pytest.raises(UnsupportedTensorError, match="'w' is on the meta device"):
        hold_tensor(holder, torch.empty(3, device="meta"), name="w")


@pytest.fixture
def placeholder(holder: Holder) -> HeldBytes:
    return HeldBytes(holder.hold([content(5000)], 5000), "the constant 'w'")


@pytest.fixture
def inside(holder: Holder) -> Iterator[None]:
    with activate(Export(holder=holder, alignment="page")):
        yield


@pytest.mark.usefixtures("inside")
def test_python_code_sees_the_content_of_a_placeholder(placeholder: HeldBytes) -> None:
    data = content(5000)
    assert isinstance(placeholder, bytes)
    assert len(placeholder) == 5000
    assert placeholder
    assert bytes(placeholder) == data
    assert placeholder[:32] == data[:32]
    assert placeholder[-5:] == data[-5:]
    assert placeholder[::-7] == data[::-7]
    assert (placeholder[0], placeholder[-1]) == (data[0], data[-1])
    assert list(placeholder) == list(data)
    assert placeholder + b"x" == data + b"x"
    assert b"x" + placeholder == b"x" + data
    assert placeholder.__contains__(data[100:200])
    with pytest.raises(IndexError):
        placeholder[5000]


def test_equal_contents_have_equal_tokens_and_others_do_not(holder: Holder) -> None:
    same, too = (HeldBytes(holder.hold([content(5000)], 5000), name) for name in "ab")
    other = HeldBytes(holder.hold([content(5000, 2)], 5000))
    longer = HeldBytes(holder.hold([content(5001)], 5001))
    assert same == too
    assert same != other
    assert {same: "found"}[too] == "found"
    assert len({same, too, other, longer}) == 3
    assert hashlib.sha256(same).digest() == hashlib.sha256(too).digest()
    assert hashlib.sha256(same).digest() != hashlib.sha256(other).digest()


def test_copies_are_the_same_object_and_a_pickle_is_refused(placeholder: HeldBytes) -> None:
    assert copy.copy(placeholder) is placeholder
    assert copy.deepcopy([placeholder])[0] is placeholder
    assert copy.deepcopy(placeholder.held) is placeholder.held
    for value in (placeholder, placeholder.held):
        with pytest.raises(StateError, match="write_program"):
            pickle.dumps(value)


def test_outside_of_a_block_a_placeholder_has_no_length(placeholder: HeldBytes) -> None:
    for use in (len, bool):
        with pytest.raises(StateError, match=r"'w' \(5000 bytes\).*write_program\(manager, path\)"):
            use(placeholder)
    assert bytes(placeholder) == content(5000)


def test_what_stands_for_held_bytes_is_told_from_what_does_not(placeholder: HeldBytes) -> None:
    assert held_in(placeholder) is placeholder.held
    assert held_in(placeholder.held) is placeholder.held
    assert held_in(b"bytes") is None
    assert held_in(None) is None
