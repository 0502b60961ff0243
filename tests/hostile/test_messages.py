"""Whatever a source is called and whatever it names, a message about it is short, one line, and of the right class."""

from __future__ import annotations

import json
import pickle
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import mmap_ninja
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import stream_pack
from stream_pack.errors import (
    ChecksumError,
    OptionError,
    SourceChecksumError,
    SourceError,
    StreamPackError,
    TruncatedSourceError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from tests.support.torch_zips import records, repacked, saved
from tests.support.zips import Member, archive

pytestmark = pytest.mark.filterwarnings("ignore")

MOST_CHARACTERS = 4500
"""Two lists of five names, each of 403 characters at most when all of it is escaped, and the words around them."""

LONG = {
    "a million letters": "n" * 1_000_000,
    "what drives a terminal": "\x1b[2J\r\n\u202e\0" * 150_000,
    "what needs escapes": "\\'\"\U000e0001" * 250_000,
}
SURROGATES = "\ud800" * 1_000_000

Case: TypeAlias = "tuple[type[StreamPackError], Callable[[str], bytes]]"


def short(name: str, most: int) -> str:
    """The first of ``name``, in at most ``most`` bytes of UTF-8."""
    return name.encode("utf-8", "surrogatepass")[:most].decode("utf-8", "ignore")


def check(error: StreamPackError, expected: type[StreamPackError]) -> None:
    assert type(error) is expected, error
    assert len(str(error)) <= MOST_CHARACTERS
    assert str(error).isprintable()


def refused(source: object, target: Path, expected: type[StreamPackError], **options: object) -> None:
    with pytest.raises(StreamPackError) as caught:
        stream_pack.convert(source, target, **options)  # type: ignore[arg-type]
    check(caught.value, expected)


# -- safetensors


def safetensors(header: str) -> bytes:
    data = header.encode()
    return struct.pack("<Q", len(data)) + data + bytes(8)


def entry(**changes: object) -> str:
    return json.dumps({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes)


SAFETENSORS: dict[str, Case] = {
    "a key twice": (
        UnsupportedCheckpointError,
        lambda n: safetensors(f"{{{json.dumps(n)}: {entry()}, {json.dumps(n)}: {entry()}}}"),
    ),
    "a dtype that is not known": (
        UnsupportedTensorError,
        lambda n: safetensors(f"{{{json.dumps(n)}: {entry(dtype=n)}}}"),
    ),
    "an entry that is a number": (UnsupportedCheckpointError, lambda n: safetensors(f"{{{json.dumps(n)}: 1}}")),
    "offsets of another length": (
        UnsupportedCheckpointError,
        lambda n: safetensors(f"{{{json.dumps(n)}: {entry(shape=[1])}}}"),
    ),
    "a hole": (
        UnsupportedCheckpointError,
        lambda n: safetensors(f"{{{json.dumps(n)}: {entry(data_offsets=[4, 12])}}}"),
    ),
    "metadata that is not text": (
        UnsupportedCheckpointError,
        lambda n: safetensors(f'{{"__metadata__": {{{json.dumps(n)}: 1}}}}'),
    ),
    "dims that fill no byte": (
        UnsupportedTensorError,
        lambda n: safetensors(f"{{{json.dumps(n)}: {entry(dtype='F4', shape=[1])}}}"),
    ),
}


# -- torch.save


def with_key(name: str, value: object) -> bytes:
    """A checkpoint whose one storage, which has no record, is called ``name``."""
    parts = records(saved(value))
    data = name.encode("utf-8", "surrogatepass")
    key = b"X" + struct.pack("<I", len(data)) + data
    parts["data.pkl"] = parts["data.pkl"].replace(b"X\1\0\0\x000", key)
    return repacked({name: data for name, data in parts.items() if name != "data/0"})


def with_pickle(data: bytes) -> bytes:
    return repacked({"data.pkl": data, "version": b"3\n"})


def without_storage(name: str) -> bytes:
    parts = records(saved({name: torch.ones(2)}))
    del parts["data/0"]
    return repacked(parts)


def with_damage(name: str) -> bytes:
    data = bytearray(saved({name: torch.arange(3.0)}))
    data[data.index(torch.arange(3.0).numpy().tobytes())] ^= 1
    return bytes(data)


def of_class(name: str) -> bytes:
    name = short(name, 4000).replace("\n", " ")
    return with_pickle(b"\x80\2cevil\n" + name.encode() + b"\n.")


def rebuilt_by(name: str) -> bytes:
    name = short(name, 4000).replace("\n", " ")
    return with_pickle(b"\x80\2ctorch._utils\n_rebuild" + name.encode() + b"\n.")


def with_record(name: str, *, times: int = 1, **changes: Any) -> bytes:
    """A checkpoint with records of a name of 65,000 bytes, which are changed as told."""
    members = [Member(f"archive/{record}", data) for record, data in records(saved({"w": torch.ones(2)})).items()]
    named = Member(f"archive/{short(name, 65_000)}", bytes(8), **changes)
    return archive([*members, *times * [named]])


def two_of_a_name(name: str) -> bytes:
    return saved({f"{name}.w": torch.ones(1), name: {"w": torch.ones(1)}})


def too_deep(name: str) -> bytes:
    value: object = torch.ones(1)
    for _ in range(101):
        value = {name[:500]: value}
    return saved(value)


TORCH: dict[str, Case] = {
    "a tensor without its storage": (TruncatedSourceError, without_storage),
    "a storage without a record": (TruncatedSourceError, lambda n: with_key(n, {"w": torch.ones(2)})),
    "damaged bytes": (SourceChecksumError, with_damage),
    "an unknown class": (UnsupportedCheckpointError, of_class),
    "an unknown way to build a tensor": (UnsupportedCheckpointError, rebuilt_by),
    "two records of a name": (SourceError, lambda n: with_record(n, times=2)),
    "an encrypted record": (UnsupportedCheckpointError, lambda n: with_record(n, flags=1)),
    "an unknown compression": (UnsupportedCheckpointError, lambda n: with_record(n, method=12)),
    "another checksum": (SourceChecksumError, lambda n: with_record(n, streamed=False, crc=5)),
    "lost bytes": (SourceChecksumError, lambda n: with_record(n, streamed=False, drop=3)),
    "text in place of a dict": (UnsupportedCheckpointError, saved),
    "bytes in place of a dict": (UnsupportedCheckpointError, lambda n: saved(n.encode())),
    "no tensors": (UnsupportedCheckpointError, lambda n: saved({n: 1})),
    "nested dicts": (
        UnsupportedCheckpointError,
        lambda n: saved({n + str(k): {n: torch.ones(1)} for k in range(9)}),
    ),
    "two tensors of a name": (UnsupportedCheckpointError, two_of_a_name),
    "a tensor inside an object": (
        UnsupportedCheckpointError,
        lambda n: saved({n: Counter({n: torch.ones(1)}), "w": torch.ones(1)}),
    ),
    "a sparse tensor": (UnsupportedTensorError, lambda n: saved({n: torch.ones(2).to_sparse()})),
    "a bare storage": (
        UnsupportedCheckpointError,
        lambda n: saved({n: torch.ones(2).untyped_storage(), "w": torch.ones(1)}),
    ),
    "bytes as a key": (UnsupportedCheckpointError, lambda n: saved({n.encode(): torch.ones(1)})),
    "a tuple as a key": (UnsupportedCheckpointError, lambda n: saved({(n, (n,)): torch.ones(1)})),
    "None below a name": (
        UnsupportedCheckpointError,
        lambda n: saved({"model": {n: {None: torch.ones(1)}}}),
    ),
    "dicts nested too deeply": (UnsupportedCheckpointError, too_deep),
}  # fmt: skip


# -- GGUF


def gguf(*, tensors: list[bytes], pairs: list[bytes]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + bytes(64)


def gguf_text(name: str) -> bytes:
    data = short(name, 65_000).encode()
    return struct.pack("<Q", len(data)) + data


def gguf_tensor(name: str, *dims: int, kind: int = 0, begin: int = 0) -> bytes:
    return gguf_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, begin)


def gguf_pair(name: str, kind: int, value: bytes) -> bytes:
    return gguf_text(name) + struct.pack("<I", kind) + value


GGUF: dict[str, Case] = {
    "a key twice": (
        UnsupportedCheckpointError,
        lambda n: gguf(tensors=[], pairs=2 * [gguf_pair(n, 7, b"\1")]),
    ),
    "a type that is not known": (
        UnsupportedTensorError,
        lambda n: gguf(tensors=[gguf_tensor(n, 1, kind=99)], pairs=[]),
    ),
    "too many dims": (
        UnsupportedCheckpointError,
        lambda n: gguf(tensors=[gguf_tensor(n, *9 * [1])], pairs=[]),
    ),
    "too many elements": (
        UnsupportedCheckpointError,
        lambda n: gguf(tensors=[gguf_tensor(n, 1 << 62)], pairs=[]),
    ),
    "a part of a block": (
        UnsupportedCheckpointError,
        lambda n: gguf(tensors=[gguf_tensor(n, 31, kind=2)], pairs=[]),
    ),
    "a hole": (
        UnsupportedCheckpointError,
        lambda n: gguf(tensors=[gguf_tensor(n, 1, begin=32)], pairs=[]),
    ),
    "two tensors of a name": (
        SourceError,
        lambda n: gguf(tensors=[gguf_tensor(n, 8), gguf_tensor(n, 8, begin=32)], pairs=[]),
    ),
    "an alignment that is text": (
        UnsupportedCheckpointError,
        lambda n: gguf(tensors=[], pairs=[gguf_pair("general.alignment", 8, gguf_text(n))]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
@pytest.mark.parametrize("cases", [SAFETENSORS, TORCH, GGUF], ids=["safetensors", "torch", "gguf"])
def test_messages_about_one_file_are_short(tmp_path: Path, cases: dict[str, Case], name: str) -> None:
    for what, (expected, build) in cases.items():
        source = tmp_path / what
        source.write_bytes(build(name))
        refused(source, tmp_path / "out.pack", expected)


@pytest.mark.parametrize(
    ("expected", "build"),
    [
        (SourceError, lambda n: safetensors(f"{{{json.dumps(n)}: {entry()}}}")),
        (SourceError, lambda n: saved({n: torch.ones(1)})),
        (TruncatedSourceError, lambda n: with_key(n, {"w": torch.ones(2)})),
        (UnsupportedCheckpointError, lambda n: saved({n: 1})),
    ],
)
def test_messages_about_lone_surrogates_are_short(
    tmp_path: Path, expected: type[StreamPackError], build: Callable[[str], bytes]
) -> None:
    (tmp_path / "source").write_bytes(build(SURROGATES))
    refused(tmp_path / "source", tmp_path / "out.pack", expected)


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_keys_are_short(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(saved({name: {"w": torch.ones(1)}, name + "2": torch.ones(1)}))
    refused(source, tmp_path / "out.pack", UnsupportedCheckpointError, key=name + "3")
    refused(source, tmp_path / "out.pack", UnsupportedCheckpointError, key=[name + "2"])
    refused(source, tmp_path / "out.pack", OptionError, key=[name, 1])


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_sets_of_files_are_short(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "1.safetensors").write_bytes(safetensors(f'{{"w": {entry()}}}'))
    text = json.dumps(name)
    for content in (
        f'{{"weight_map": {{"w": {text}}}}}',
        f'{{"weight_map": {{{text}: 1}}}}',
        f'{{"weight_map": {{"w": {{{text}: 1}}}}}}',
        f'{{"weight_map": {{{text}: "1.safetensors", {text}: "1.safetensors"}}}}',
        f'{{"weight_map": {{{text}: "1.safetensors"}}}}',
    ):
        index.write_text(content)
        refused(index, tmp_path / "out.pack", UnsupportedCheckpointError)


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_llama_shards_are_short(tmp_path: Path, name: str) -> None:
    params = tmp_path / "params.json"
    params.write_text('{"dim": 2}')
    shards = [tmp_path / f"consolidated.{number:02}.pth" for number in range(2)]
    one, two = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float16)
    for first, second in (
        ({name: one}, {"w": one}),
        ({name: one}, {name: two}),
        ({name: one}, {name: one}),
        ({name + ".norm.weight": one}, {name + ".norm.weight": 2 * one}),
    ):
        torch.save(first, shards[0])
        torch.save(second, shards[1])
        refused(tmp_path, tmp_path / "out.pack", UnsupportedCheckpointError)
    for content in (f'{{"dim": {json.dumps(name)}}}', f'{{"dim": {{{json.dumps(name)}: 1}}}}'):
        params.write_text(content)
        refused(tmp_path, tmp_path / "out.pack", UnsupportedCheckpointError)


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_distributed_checkpoints_are_short(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    save_distributed({name: torch.ones(4)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    whole = (folder / ".metadata").read_bytes()

    def tensor_of(metadata: Metadata) -> TensorStorageMetadata:
        tensor = metadata.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        return tensor

    def place_of(metadata: Metadata) -> object:
        return next(iter(metadata.storage_data.values()))

    def elsewhere(metadata: Metadata) -> None:
        place: Any = place_of(metadata)
        place.offset, place.length = 1, place.length - 1

    changes: list[tuple[type[StreamPackError], Callable[[Metadata], object]]] = [
        (UnsupportedCheckpointError, lambda m: setattr(place_of(m), "relative_path", name)),
        (UnsupportedCheckpointError, lambda m: m.storage_data.clear()),
        (UnsupportedCheckpointError, lambda m: setattr(tensor_of(m), "chunks", None)),
        (UnsupportedCheckpointError, lambda m: setattr(tensor_of(m), "size", (9,))),
        (UnsupportedCheckpointError, lambda m: setattr(tensor_of(m), "size", name)),
        (UnsupportedCheckpointError, lambda m: setattr(tensor_of(m), "properties", None)),
        (UnsupportedCheckpointError, lambda m: setattr(place_of(m), "transform_descriptors", [1])),
        (UnsupportedCheckpointError, lambda m: setattr(place_of(m), "length", 1)),
        (TruncatedSourceError, lambda m: setattr(place_of(m), "length", 1 << 40)),
        (SourceError, elsewhere),
        (UnsupportedTensorError, lambda m: setattr(tensor_of(m).properties, "dtype", torch.qint8)),
        (UnsupportedCheckpointError, lambda m: setattr(tensor_of(m).properties, "dtype", torch.int32)),
    ]  # fmt: skip
    for expected, change in changes:
        metadata = pickle.loads(whole)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(folder, tmp_path / "out.pack", expected)


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_ninja_folders_are_short(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "array"
    for file in ("type.ninja", "dtype.ninja", "order.ninja"):
        mmap_ninja.np_from_ndarray(folder, np.ones(3))
        (folder / file).write_text(name)
        refused(folder, tmp_path / "out.pack", UnsupportedCheckpointError)


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_tensors_in_memory_are_short(tmp_path: Path, name: str) -> None:
    for value in (1, np.array([None]), torch.ones(2).to_sparse(), np.ma.array([1])):
        refused({name: value}, tmp_path / "out.pack", UnsupportedTensorError)
    refused({(name,): np.ones(1)}, tmp_path / "out.pack", SourceError)


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_messages_about_packs_are_short(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source.pack"
    array = np.arange(1000, dtype=np.float64)
    stream_pack.save_file({name: array}, source)
    data = bytearray(source.read_bytes())
    data[data.index(array.tobytes())] ^= 1
    source.write_bytes(data)
    refused(source, tmp_path / "out.pack", ChecksumError)
    with stream_pack.open(source, verify="lazy") as pack:
        with pytest.raises(StreamPackError) as caught:
            pack[name].numpy()
        assert len(str(caught.value)) <= MOST_CHARACTERS
        with pytest.raises(StreamPackError) as caught:
            pack[name + "2"]
        assert len(str(caught.value)) <= MOST_CHARACTERS
