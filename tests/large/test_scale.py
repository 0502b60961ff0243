"""Memory does not grow with the bytes of a model, and with the number of its tensors no more than it has to."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import stream_pack
from tests.support.memory import Measured, measure, needs_proc
from tests.support.torch_zips import records, saved
from tests.support.zips import Member, archive

MB = 1_000_000
ARRAY, DOUBLE = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT64

pytestmark = needs_proc

PRODUCE = """
import sys, torch
ones = torch.ones(8 << 20, dtype=torch.int32)
torch.save({f"layers.{n}": ones * n for n in range(int(sys.argv[1]))}, sys.stdout.buffer)
"""


def peak(*arguments: object, stdin: int | None = None) -> int:
    argv = [sys.executable, "-m", "stream_pack", "convert", "--quiet", *map(str, arguments)]
    return measure(argv, stdin=stdin).peak_anonymous_nbytes


def peak_of_a_pipe(parts: int, target: Path) -> int:
    """Of packing ``parts`` times 32 MiB."""
    with subprocess.Popen([sys.executable, "-c", PRODUCE, str(parts)], stdout=-1) as producer:
        assert producer.stdout is not None
        nbytes = peak("-", target, stdin=producer.stdout.fileno())
    assert target.stat().st_size > parts * (32 << 20)
    target.unlink()
    return nbytes


def test_four_times_the_bytes_take_the_same_memory(tmp_path: Path) -> None:
    small, large = (peak_of_a_pipe(parts, tmp_path / "pack") for parts in (8, 32))
    assert abs(large - small) < 10 * MB


def test_two_hundred_thousand_tensors_take_less_than_500_mb(tmp_path: Path) -> None:
    source, target = tmp_path / "model.pt", tmp_path / "pack"
    torch.save({f"layers.{n}.weight": torch.full((4,), float(n)) for n in range(200_000)}, source)
    assert peak(source, target) < 500 * MB
    with stream_pack.open(target) as pack:
        assert len(pack) == 200_000
        assert pack["layers.199999.weight"].numpy().tolist() == [199_999.0] * 4


def test_a_million_records_that_no_tensor_needs_take_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    parts = records(saved({"w": torch.arange(3.0)}))
    members = [Member(f"archive/{name}", data) for name, data in parts.items()]
    path.write_bytes(archive(members, empty=1_000_000))
    assert peak(path, tmp_path / "pack") < 500 * MB


def safetensors_of_many(path: Path) -> None:
    offsets = {
        f"layers.{n}.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n in range(200_000)
    }
    header = json.dumps(offsets).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(800_000))


def gguf_of_a_vocabulary(path: Path) -> None:
    """Two million numbers before the data, which are 40 MB as text."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_key_value("scores", np.random.default_rng(0).random(2_000_000).tolist(), ARRAY, DOUBLE)
    writer.add_tensor("w", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LIMITED = """
import sys, stream_pack
limit, source, target = int(sys.argv[1]), *sys.argv[2:]
try:
    if target == "forecast":
        stream_pack.forecast(source, max_memory=limit)
    else:
        stream_pack.convert(source, target, max_memory=limit)
except stream_pack.LimitError as error:
    print(error.limit)
"""


def limited(limit: int, source: Path, target: object) -> Measured:
    argv = [sys.executable, "-c", LIMITED, str(limit), str(source), str(target)]
    return measure(argv)


@pytest.mark.parametrize("write", [safetensors_of_many, gguf_of_a_vocabulary])
def test_a_limit_is_kept_while_the_head_of_a_checkpoint_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "pack"
    write(source)
    for limit in (100 * MB, 200 * MB, 300 * MB, 500 * MB):
        measured = limited(limit, source, target)
        assert measured.peak_anonymous_nbytes <= limit
        assert target.exists() == (not measured.stdout)
    assert target.exists()  # 500 MB were enough


NAMES = [f"model.layers.{number}.attention.wq.weight" for number in range(50_000)]


def hugging_face_of_many(folder: Path) -> None:
    folder.mkdir()
    weight_map = {}
    for number in range(5):
        names = NAMES[number::5]
        header = json.dumps(
            {name: {"dtype": "U8", "shape": [1], "data_offsets": [k, k + 1]} for k, name in enumerate(names)}
        ).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(len(names))
        (folder / f"{number}.safetensors").write_bytes(data)
        weight_map.update(dict.fromkeys(names, f"{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def distributed_of_many(folder: Path) -> None:
    """Metadata of chunks that stand 2,000 bytes apart in a file that begins like one of torch's."""
    folder.mkdir()
    one = torch.Size([1])
    properties = TensorProperties(dtype=torch.float32)
    chunks = [ChunkStorageMetadata(torch.Size([0]), one)]
    metadata = Metadata(
        {name: TensorStorageMetadata(properties, one, chunks) for name in NAMES},
        planner_data={name: ("model", name.removeprefix("model.")) for name in NAMES},
        storage_data={
            MetadataIndex(name, torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 2000 * k, 2000)
            for k, name in enumerate(NAMES)
        },
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes(b"PK\3\4")
    os.truncate(folder / "__0_0.distcp", 2000 * len(NAMES))


def torch_save_of_many(path: Path) -> None:
    torch.save({name: torch.tensor(k) for k, name in enumerate(NAMES)}, path)


def deflated_of_many(path: Path) -> None:
    torch_save_of_many(path)
    parts = records(path.read_bytes())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in parts.items():
            made.writestr(f"archive/{name}", data)


def pickle_bomb(path: Path) -> None:
    """A few kilobytes that expand to millions of lists."""
    pickled = b"\x80\x02}X\1\0\0\0w](" + (b"(" + b"]" * 1000 + b"l") * 2000 + b"es."
    parts = records(saved({"w": torch.ones(1)})) | {"data.pkl": pickled}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in parts.items():
            made.writestr(f"archive/{name}", data)
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize(
    "write", [hugging_face_of_many, distributed_of_many, torch_save_of_many, deflated_of_many, pickle_bomb]
)
def test_a_limit_is_kept_while_a_pickle_or_the_files_of_a_set_are_read(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    write(source)
    steps = (40 * MB, 60 * MB, 80 * MB, 100 * MB)
    peaks = [limited(limit, source, "forecast").peak_anonymous_nbytes for limit in steps]
    assert all(peak <= limit for peak, limit in zip(peaks, steps))
    assert peaks[-1] > 50 * MB  # unlike what nobody limits, this does not fit into the first


def test_the_forecast_names_the_limit_that_the_conversion_has(tmp_path: Path) -> None:
    source = tmp_path / "source"
    safetensors_of_many(source)
    enough = 120 * MB  # for the header, not for the plan
    foretold, real = (int(limited(enough, source, target).stdout) for target in ("forecast", tmp_path / "pack"))
    assert foretold > enough
    assert abs(foretold - real) < 2 * MB
