"""Files whose first bytes are another format's magic are read as what they are, from a file and from a pipe.

A safetensors file begins with the length of its header and a tar archive with the name of a file, so both can begin
like anything else.  The files here are the smallest that do, from the programs that write them.
"""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import struct
import tarfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, sniff
from tests.sources.byte_sources import Dribble

WEIGHT = np.array([1, 2], np.float32)
LENGTHS = {
    **{f"protocol {n}": 0x80 + (n << 8) for n in range(2, 6)},
    "gzip": int.from_bytes(gzip.compress(b"")[:2], "little"),
    "gzip and its method": int.from_bytes(gzip.compress(b"")[:3], "little"),
}
"""Lengths of a header that spell a magic, by what it is the magic of."""
ZIP_LENGTH = int.from_bytes(b"PK\3\4", "little")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.just('\0\0\0\0{"w":{'),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values) | st.tuples(values, values),
    max_leaves=5,
)


def with_header_of(nbytes: int) -> bytes:
    """A safetensors file whose header has this length: the format allows spaces at its end."""
    data = safetensors.numpy.save({"w": WEIGHT})
    end = 8 + int.from_bytes(data[:8], "little")
    return struct.pack("<Q", nbytes) + data[8:end].rstrip().ljust(nbytes) + data[end:]


def saying_at(at: int, text: bytes) -> bytes:
    """A safetensors file that has ``text`` at byte ``at``, in its metadata."""
    every = (safetensors.numpy.save({"w": WEIGHT}, metadata={"d": "m" * n + text.decode()}) for n in range(at))
    return next(data for data in every if data.startswith(text, at))


def archived(name: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo(name.decode("latin-1")))
    return file.getvalue()


def gguf_of(tensors: int, path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    for number in range(tensors):
        writer.add_tensor(f"t{number}", WEIGHT + number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def converted(data: bytes, folder: Path) -> dict[str, list[float]]:
    """The tensors of the pack that a file and a pipe of these bytes become."""
    (folder / "source").write_bytes(data)
    stream_pack.convert(folder / "source", folder / "of a file")
    stream_pack.convert(Dribble(data, step=1000), folder / "of a pipe")
    assert (folder / "of a file").read_bytes() == (folder / "of a pipe").read_bytes()
    with stream_pack.open(folder / "of a file") as pack:
        return {name: pack[name].numpy().tolist() for name in pack}


@pytest.mark.parametrize("magic", LENGTHS)
def test_a_safetensors_header_may_be_as_long_as_a_magic_says(magic: str, tmp_path: Path) -> None:
    data = with_header_of(LENGTHS[magic])
    assert safetensors.numpy.load(data)["w"].tolist() == [1, 2]
    assert converted(data, tmp_path) == {"w": [1, 2]}


@pytest.mark.slow  # 67 MB of header
def test_a_safetensors_header_may_be_as_long_as_the_magic_of_zip_says(tmp_path: Path) -> None:
    data = with_header_of(ZIP_LENGTH)
    assert data.startswith(b"PK\3\4")
    assert converted(data, tmp_path) == {"w": [1, 2]}


@pytest.mark.parametrize("nbytes", [0x80 + (4 << 8), ZIP_LENGTH])
def test_a_cut_safetensors_file_is_recognised_too(nbytes: int) -> None:
    whole = struct.pack("<Q", nbytes) + safetensors.numpy.save({"w": WEIGHT})[8:].rstrip(b"\0")
    for end in range(9, 60):
        assert sniff(whole[:end]) is Kind.SAFETENSORS


def test_the_metadata_of_a_safetensors_file_may_have_the_magic_of_tar_where_tar_has_it(tmp_path: Path) -> None:
    data = saying_at(257, b"ustar")
    assert safetensors.numpy.load(data)["w"].tolist() == [1, 2]
    assert converted(data, tmp_path) == {"w": [1, 2]}


@given(st.dictionaries(st.text(min_size=1), st.text()), st.dictionaries(st.text(), st.just(WEIGHT), max_size=3))
def test_any_safetensors_file_is_recognised(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    tensors = {name: array for name, array in tensors.items() if name != "__metadata__"}
    assert sniff(safetensors.numpy.save(tensors, metadata=metadata)[:SNIFF_NBYTES]) is Kind.SAFETENSORS


def test_a_gguf_file_may_have_as_many_tensors_as_the_code_of_a_brace(tmp_path: Path) -> None:
    data = gguf_of(ord("{"), tmp_path / "model.gguf")
    assert data[8:9] == b"{"  # where a safetensors header begins
    assert converted(data, tmp_path)["t122"] == [123, 124]


@given(VALUES, st.integers(2, 5), st.booleans())
def test_no_pickle_is_taken_for_safetensors(value: object, protocol: int, optimized: bool) -> None:
    data = pickle.dumps(value, protocol=protocol)
    assert sniff(pickletools.optimize(data) if optimized else data) is Kind.PICKLE


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02U\x05\0\0\0\0{}\x86.",  # a short string, an empty dict, both in a tuple
        pickletools.optimize(pickle.dumps('\0{"a"', protocol=2)),
        pickle.dumps('\0{"w"', protocol=2),
    ],
)
def test_a_pickle_with_a_length_and_a_brace_where_safetensors_has_them_is_a_pickle(data: bytes) -> None:
    assert data[4:9] == b"\0\0\0\0{"
    pickle.loads(data)
    assert sniff(data) is Kind.PICKLE


@pytest.mark.parametrize(
    "name",
    [
        b"GGUF/model.gguf", b"BZh91AY&SY", b"PK\3\4", b"\x1f\x8b\x08", b"\x80\x02model", b"\x80\x05}", b"testET12.pte",
        b"testFT01.ptd", b"testFT01FH01", b"\x93NUMPY", b"\x89HDF\r\n\x1a\n", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ",
        b"\x04\x22\x4d\x18", b"<html>", b"<!doctype", b"version https://git-lfs", b"PK\5\6", b"L", b'{"w":{',
        b"model.pt",
    ],
)  # fmt: skip
def test_the_first_name_in_a_tar_archive_may_be_any_magic(name: bytes) -> None:
    data = archived(name)
    assert data.startswith(name)
    assert sniff(data[:SNIFF_NBYTES]) is Kind.TAR


def test_a_tar_archive_from_before_its_magic_is_one() -> None:
    # Version 7 of Unix: the same header, with nothing after the name of the link.
    header = bytearray(archived(b"model.pt")[:SNIFF_NBYTES])
    header[257:] = bytes(SNIFF_NBYTES - 257)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    assert tarfile.open(fileobj=io.BytesIO(bytes(header) + bytes(1024))).getnames() == ["model.pt"]
    assert sniff(bytes(header)) is Kind.TAR


@pytest.mark.parametrize(
    "text", [b"GGUF is a format.\n", b"the ET12 files\n", b"the FT01 and FH01\n", b"PK", b"u" * 257 + b"ustar"]
)
def test_a_text_about_a_format_is_no_file_of_it(text: bytes) -> None:
    assert sniff(text) is Kind.TEXT


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves_is_never_taken_for_safetensors(legacy: bool, protocol: int, tmp_path: Path) -> None:
    file = io.BytesIO()
    tensors = {'{"w":{': torch.tensor([1.0, 2.0])}
    torch.save(tensors, file, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    assert converted(file.getvalue(), tmp_path) == {'{"w":{': [1, 2]}
