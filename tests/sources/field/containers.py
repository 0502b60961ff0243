"""How checkpoints are stored: by every version of torch, packed again by others, cut, joined and damaged."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import safetensors.torch
import torch

from tests.hostile.test_pickles import number, state_dict, tensor, with_pickle
from tests.sources.field.case import Build, Case, packed, refused
from tests.sources.field.content import FLOAT8, all_views, of_dtypes
from tests.sources.torch_save.test_repacked import mixed, zipped
from tests.support.torch_zips import records, repacked, saved
from tests.support.zips import Member, archive

__all__ = ["CONTAINERS"]


def twelve() -> dict[str, torch.Tensor]:
    """Enough storages for two orders of their numbers, and several kinds of views."""
    plain = {f"t{k}": torch.arange(k, k + 5.0) for k in range(12)}
    return plain | all_views()


def legacy(value: object) -> bytes:
    return saved(value, _use_new_zipfile_serialization=False)


def parts() -> dict[str, bytes]:
    return records(saved(twelve()))


def of_names(names: Iterable[str]) -> bytes:
    found = parts()
    return repacked({name: found[name] for name in names})


def storages() -> list[str]:
    return [name for name in parts() if name.startswith("data/")]


def without_byteorder() -> bytes:
    return of_names(name for name in parts() if name != "byteorder")


def lexicographic() -> bytes:
    """torch 1.6 to 2.5."""
    return of_names(["data.pkl", *sorted(storages()), "version"])


def reversed_storages() -> bytes:
    return of_names(["data.pkl", "byteorder", *reversed(storages()), "version"])


def big_endian() -> bytes:
    found = records(saved(of_dtypes(ENDIAN))) | {"byteorder": b"big"}
    for key, dtype in enumerate(ENDIAN):
        unit = dtype.itemsize // (2 if dtype.is_complex else 1)
        words = np.frombuffer(found[f"data/{key}"], np.dtype(f"u{unit}"))
        found[f"data/{key}"] = words.byteswap().tobytes()
    return repacked(found)


ENDIAN = [torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.complex64]


def without_crc() -> bytes:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return saved(twelve())
    finally:
        torch.serialization.set_crc32_options(before)


def aligned() -> bytes:
    with torch.utils.serialization.config.patch("save.storage_alignment", 4096):  # type: ignore[attr-defined]
        return saved(twelve())


def wide_descriptors() -> bytes:
    """As torch writes records whose header lies past 4 GiB, however short they are."""
    return archive(
        Member(f"archive/{name}", data, streamed=len(data) > 0, wide=len(data) > 0) for name, data in parts().items()
    )


def unreferenced() -> bytes:
    return repacked(parts() | {"data/77": b"PK\7\10" * 5 + b"PK\3\4" + bytes(range(256))})


def jit() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        for name in ("code/m.py", "data.pkl", "constants.pkl"):
            made.writestr(f"archive/{name}", parts()["data.pkl"])
    return target.getvalue()


def exported() -> bytes:
    return repacked({"archive_format": b"pt2", "data/weights/w": bytes(4), "models/m.json": b"{}"})


def tar(name: str) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as made:
        made.addfile(tarfile.TarInfo(name), io.BytesIO())
    return target.getvalue()


def safe() -> dict[str, torch.Tensor]:
    """In the order in which safetensors stores them: the widest elements first."""
    return {"n": torch.tensor(7), "w": torch.arange(6.0).reshape(2, 3)}


def safetensors_file(*, padding: int = 0) -> bytes:
    """Its header padded with more spaces than its own writer uses."""
    data = safetensors.torch.save(safe(), metadata={"format": "pt"})
    nbytes = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + nbytes] + b" " * padding
    return len(header).to_bytes(8, "little") + header + data[8 + nbytes :]


def crafted(shape: list[int], *offsets: list[int], nbytes: int | None = None) -> bytes:
    """A safetensors file of float32 tensors of one shape at these offsets."""
    header = json.dumps(
        {f"t{k}": {"dtype": "F32", "shape": shape, "data_offsets": at} for k, at in enumerate(offsets)}
    ).encode()  # fmt: skip
    length = len(header) if nbytes is None else nbytes
    return length.to_bytes(8, "little") + header + bytes(max(end for _, end in offsets))


def gguf_file() -> bytes:
    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "f", "llama")
        for name, value in safe().items():
            writer.add_tensor(name, value.reshape(-1).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "f").read_bytes()


def npz() -> bytes:
    target = io.BytesIO()
    np.savez(target, w=np.ones(3))
    return target.getvalue()


def damaged() -> bytes:
    """A bit of a storage is flipped: torch loads this without a word."""
    data = bytearray(saved({"w": torch.arange(7.0)}))
    data[data.index(torch.arange(7.0).numpy().tobytes()) + 9] ^= 1
    return bytes(data)


def cut(where: bytes, nbytes: int) -> bytes:
    data = saved({"w": torch.arange(200.0)})
    return data[: data.index(where) + nbytes]


def short_write() -> bytes:
    return repacked(
        records(saved({"w": torch.arange(200.0)})),
        lambda m: Member(m.name, m.data, streamed=m.streamed, drop=500 if m.name.endswith("data/0") else 0),
    )  # fmt: skip


def interrupted() -> bytes:
    """The producer failed before its pickle was written, and the archive was closed all the same."""
    return of_names([name for name in parts() if name != "data.pkl"])


def duplicate() -> bytes:
    return repacked([*parts().items(), ("data/0", bytes(20))])


MODEL = ({"a": torch.arange(5.0)}, {"b": torch.arange(5.0)})
WAYS = [
    packed(f"pickle protocol {n}", twelve, partial(saved, twelve(), pickle_protocol=n))
    for n in (1, 2, 3, 4, 5)
]  # fmt: skip

STORED: list[Case] = [
    *WAYS,
    refused("pickle protocol 0", lambda: with_pickle(pickle.dumps({"w": 1}, 0)), "opcode|damaged"),
    packed("without a byteorder record", twelve, without_byteorder),
    packed("big-endian", lambda: of_dtypes(ENDIAN), big_endian),
    packed("without CRCs", twelve, without_crc),
    packed("storages aligned to 4096", twelve, aligned),
    packed("lexicographic order, as old versions wrote", twelve, lexicographic),
    packed("storages reversed", twelve, reversed_storages),
    packed("deflated", twelve, lambda: zipped(parts())),
    packed("deflated by a program that cannot seek", twelve, lambda: zipped(parts(), streamed=True)),
    packed("partly deflated", twelve, lambda: mixed(parts(), deflated={"data/3", "data/12"})),
    packed("sorted, so that the pickle is not first", twelve, lambda: of_names(sorted(parts(), reverse=True))),
    refused("TorchScript", jit, "TorchScript"),
    refused("a torch.export program", exported, r"torch\.export program"),
    packed("a storage that nothing refers to, full of decoys", twelve, unreferenced),
    packed("zip64 descriptors of small records", twelve, wide_descriptors),
    packed("legacy", twelve, lambda: legacy(twelve())),
    packed("legacy float8, which torch cannot load", lambda: of_dtypes(FLOAT8), lambda: legacy(of_dtypes(FLOAT8))),
    refused("torch 0.1's tar", partial(tar, "sys_info"), r"torch 0\.1: load it"),
    refused("NeMo's tar", partial(tar, "model_weights.ckpt"), r"a tar archive: pipe the checkpoint in it, `tar -xOf "),
    packed("safetensors", safe, safetensors_file),
    packed("safetensors with a padded header", safe, partial(safetensors_file, padding=100)),
    refused("safetensors with a hole", lambda: crafted([1], [0, 4], [8, 12]), "a hole, an overlap"),
    refused("safetensors with an overlap", lambda: crafted([2], [0, 8], [4, 12]), "a hole, an overlap"),
    refused("safetensors of another length", lambda: crafted([3], [0, 8]), "damaged"),
    refused("safetensors with a header of 200 MB", lambda: crafted([1], [0, 4], nbytes=200_000_000), "200000000|not"),
    packed("GGUF", lambda: {name: value.reshape(-1) for name, value in safe().items()}, gguf_file),
    refused("gzip", lambda: gzip.compress(saved(safe())), "gzip"),
    refused("npz", npz, "NumPy archive|npz"),
    refused("a bare pickle", lambda: pickle.dumps({"w": 1}), "pickle"),
    refused("text", lambda: b"hello world\n" * 9, "text"),
    refused("HTML", lambda: b"<!DOCTYPE html><html>404</html>", "HTML|web page"),
    refused("a Git LFS pointer", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
]  # fmt: skip

DAMAGED: list[Case] = [
    refused("an empty stream", bytes, "empty"),
    refused("a log line before it", lambda: b"loading...\n" + saved(safe()), "loading"),
    refused("cut inside a storage", partial(cut, torch.arange(200.0).numpy().tobytes(), 70), "missing|ends|cut|end"),
    refused("cut before the directory", partial(cut, b"PK\1\2", 0), "cut short"),
    refused("cut inside the end record", partial(cut, b"PK\5\6", 9), "end|directory"),
    refused("a flipped bit", damaged, r"tensor 'w'.* is damaged in the source"),
    refused("a short write upstream", short_write, "short write upstream"),
    refused("a producer that failed halfway", interrupted, "interrupted|no checkpoint"),
    refused("two checkpoints joined", lambda: b"".join(map(saved, MODEL)), "bytes follow the end"),
    refused("trailing zeros", lambda: saved(MODEL[0]) + bytes(100), "bytes follow the end"),
    refused("a record twice", duplicate, "two records named"),
    refused("more elements than the record has", lambda: with_pickle(state_dict(tensor(numel=20))), "bytes"),
]  # fmt: skip


def hostile(value: bytes) -> Build:
    return lambda: with_pickle(state_dict(tensor(), value))


HOSTILE: list[Case] = [
    packed(
        "a memo index of four billion",
        lambda: {"w0": torch.zeros(10)},
        lambda: with_pickle(b"\x80\x02}r\xff\xff\xff\xff" + state_dict(tensor())[3:]),
    ),
    refused("a call of os.system", hostile(b"cposix\nsystem\nX\4\0\0\0true\x85R"), r"posix\.system"),
    refused("a shape beyond its storage", lambda: with_pickle(state_dict(tensor(shape=(11,)))), "storage"),
    refused("an offset beyond its storage", lambda: with_pickle(state_dict(tensor(offset=1))), "storage"),
    refused("a stride beyond its storage", lambda: with_pickle(state_dict(tensor(strides=(2,)))), "storage"),
    refused("a negative offset", lambda: with_pickle(state_dict(tensor(offset=-1))), "."),
    refused("a string of 4 GiB", hostile(b"X\xff\xff\xff\xff"), "a string of 4294967295 bytes"),
    refused("200,000 marks", hostile(b"(" * 200_000), "nested more than"),
    refused("100,000 lists in lists", hostile(b"]" * 100_000 + b"a" * 99_999 + b"0"), ".", steps=(65536,)),
    refused("items set on a tensor", hostile(tensor() + b"NNs"), "it sets items"),
    refused("an extension opcode", hostile(b"\x82\1"), "opcode 0x82"),
    refused("a stack that runs empty", hostile(b"0000000"), "its stack underflows"),
    refused("a value that was never stored", hostile(b"h\7"), "reads memo entry 7"),
    refused("a list as a key", hostile(b"}]Ns"), "a list as a key"),
    refused("2**62 elements without bytes", lambda: with_pickle(state_dict(tensor(numel=2**62))), "."),
    refused("an integer for a tensor's name", hostile(number(2**70) + tensor() + b"sN"), "."),
]  # fmt: skip

CONTAINERS: list[Case] = [*STORED, *DAMAGED, *HOSTILE]
