"""What inputs look like: real files of the programs that write them, and the mishaps people report."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, describe_start, sniff


def torch_save(value: object, *, legacy: bool = False, protocol: int = torch.serialization.DEFAULT_PROTOCOL) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    return file.getvalue()


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return file.getvalue()


def tarred(tar_format: int, name: str = "model_weights.ckpt") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, w=np.ones(3))
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(3))
    return file.getvalue()


WEIGHTS = {"w": torch.ones(3)}
TEXT = b"one of the things that people pipe into a converter\n"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
ZSTD = bytes.fromhex("28b52ffd0400590000746578740a")  # echo text | zstd
LZ4 = bytes.fromhex("04224d1864 40a7".replace(" ", ""))  # the frame header of lz4


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"", Kind.EMPTY),
        (b"\0\0\0\0MP00" + bytes(16), Kind.PACK),
        (torch_save(WEIGHTS), Kind.TORCH_ZIP),
        (torch_save({}), Kind.TORCH_ZIP),
        (zipped("archive/data/0", "archive/data.pkl"), Kind.TORCH_ZIP),
        (zipped("archive/data/94743424565712", "archive/data.pkl"), Kind.TORCH_ZIP),
        (zipped("m/.data/serialization_id", "m/data.pkl"), Kind.TORCH_ZIP),
        (zipped("m/code/__torch__.py", "m/data.pkl"), Kind.TORCH_SCRIPT),
        (zipped("m/data/weights/weight_0"), Kind.TORCH_EXPORT),
        (zipped("m/models/model.json"), Kind.TORCH_EXPORT),
        (zipped("notes/version.txt"), Kind.ZIP),
        (zipped(), Kind.ZIP),
        (npz(), Kind.NPZ),
        (npy(), Kind.NPY),
        (safetensors.numpy.save({"w": np.ones(3)}), Kind.SAFETENSORS),
        (safetensors.numpy.save({}), Kind.SAFETENSORS),
        ((2**32).to_bytes(8, "little") + b'{"w":', Kind.SAFETENSORS),
        *[(torch_save(WEIGHTS, legacy=True, protocol=n), Kind.TORCH_LEGACY) for n in range(1, 6)],
        *[(pickle.dumps({"w": 1}, protocol=n), Kind.PICKLE) for n in range(2, 6)],
        (b"GGUF\3\0\0\0", Kind.GGUF),
        (b"\x89HDF\r\n\x1a\n\0", Kind.HDF5),
        (b"\x1c\0\0\0ET12eh00", Kind.PTE),
        (b"\x1c\0\0\0FT01\0\0\0\0", Kind.PTD),
        (tarred(tarfile.GNU_FORMAT), Kind.TAR),
        (tarred(tarfile.USTAR_FORMAT), Kind.TAR),
        (tarred(tarfile.USTAR_FORMAT, "sys_info"), Kind.TORCH_TAR),
        (tarred(tarfile.USTAR_FORMAT, "sys_info.txt"), Kind.TAR),
        (gzip.compress(TEXT, mtime=0), Kind.GZIP),
        (bz2.compress(TEXT), Kind.BZIP2),
        (lzma.compress(TEXT), Kind.XZ),
        (ZSTD, Kind.ZSTD),
        (LZ4, Kind.LZ4),
        (bytes(100), Kind.ZEROS),
        (b"<!DOCTYPE html>\n<html>", Kind.HTML),
        (b"\xef\xbb\xbf\n <HTML lang='en'>", Kind.HTML),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', Kind.HTML),
        (LFS, Kind.GIT_LFS),
        (b"loading...\n" + torch_save(WEIGHTS), Kind.LEADING_TEXT),
        (b"loading...\n" + torch_save(WEIGHTS, legacy=True), Kind.LEADING_TEXT),
        (b"\x1b[32mdone\x1b[0m\r\n\0\0\0\0MP00", Kind.LEADING_TEXT),
        (TEXT, Kind.TEXT),
        (b"BZhang wrote this", Kind.TEXT),
        ("ünïcödé ".encode() * 100, Kind.TEXT),
        (b'{"metadata": {}}', Kind.TEXT),
        (b"weights {of a model}", Kind.TEXT),  # safetensors too has "{" as its ninth byte
        (b"x" + "é".encode() * 300, Kind.TEXT),  # 512 bytes end inside a character
        (b"\1\2\3" + torch_save(WEIGHTS), Kind.UNKNOWN),
        (b"\x01\x02\x03\x04", Kind.UNKNOWN),
        (b"PK", Kind.TEXT),
        (b"\xff\xfe" + TEXT, Kind.UNKNOWN),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else repr(value[:3]),
)
def test_the_first_bytes_tell_what_an_input_claims_to_be(start: bytes, kind: Kind) -> None:
    assert sniff(start[:SNIFF_NBYTES]) is kind


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", ["empty"]),
        (gzip.compress(TEXT, mtime=0), ["compressed", "gzip -dc"]),
        (ZSTD, ["compressed", "zstd -dc"]),
        (LFS, ["Git LFS", "git lfs pull"]),
        (zipped("m/code/__torch__.py"), ["TorchScript", "save its state_dict()"]),
        (b"<html>404", ["web page", "'<html>404'", "login or error page"]),
        (b"loading...\n" + torch_save(WEIGHTS), ["b'loading...\\n'", "print to stdout"]),
        (b"\x01\x02\xff" + bytes(20), ["01 02 ff 00"]),
        (b"\x01\x02", ["01 02", "(the whole input)"]),
    ],
    # Later bytes of an archive are its time, and a name has to be the same in every process.
    ids=lambda value: repr(value[:3]),
)
def test_the_description_says_what_it_looks_like_and_what_to_do(start: bytes, words: list[str]) -> None:
    described = describe_start(start[:SNIFF_NBYTES])
    assert [word for word in words if word not in described] == []


@given(st.binary(max_size=600) | st.binary(max_size=80).map(lambda rest: b"PK\3\4" + rest))
def test_any_bytes_are_described_in_one_printable_line(start: bytes) -> None:
    described = describe_start(start)
    assert described.isprintable()
    assert len(described) < 250


def test_a_torchscript_archive_without_tensors_passes_for_a_checkpoint_until_it_is_read() -> None:
    # Its pickle stands first as in a checkpoint; that it names a class of code is found out by unpickling.
    assert sniff(zipped("m/data.pkl", "m/code/__torch__.py")) is Kind.TORCH_ZIP
