"""What the writer writes, read by the reader that was written from docs/FORMAT.md alone."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

import stream_pack
from stream_pack.format.header import To
from tests.vectors.minimal_reader import read

FOLDER = Path(__file__).parent.parent / "vectors"
VECTOR = (FOLDER / "v1-mp00.pack").read_bytes()
VECTORS: dict[To, str] = {"mps": "v1-mp00.pack", "xnnpack": "v1-xh00.pack", "ptd": "v1-ft01.pack"}
KINDS = st.sampled_from(list(VECTORS))


def tensors_of_the_vector() -> dict[str, torch.Tensor]:
    """Section 15 of docs/FORMAT.md."""
    embedding = torch.arange(1.0, 7.0).reshape(2, 3)
    return {
        "embed.weight": embedding,
        "norm.bias": torch.tensor([1.0, 2.0, 3.0]).to(torch.bfloat16),
        "head.weight": embedding,
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "step": torch.tensor(7),
    }


@pytest.mark.parametrize("to", VECTORS)
def test_the_writer_writes_the_vector_byte_for_byte(to: To, tmp_path: Path) -> None:
    path = tmp_path / "pack"
    stream_pack.save_file(tensors_of_the_vector(), path, to=to, metadata={"format": "pt"})
    assert path.read_bytes() == (FOLDER / VECTORS[to]).read_bytes()


def test_by_default_the_writer_writes_the_head_of_mps(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    stream_pack.save_file(tensors_of_the_vector(), path, metadata={"format": "pt"})
    assert path.read_bytes() == VECTOR


@pytest.mark.parametrize("to", VECTORS)
@pytest.mark.parametrize("source", VECTORS)
def test_a_vector_converts_into_any_other_by_itself(source: To, to: To, tmp_path: Path) -> None:
    path = tmp_path / "pack"
    stream_pack.convert(FOLDER / VECTORS[source], path, to=to)
    assert path.read_bytes() == (FOLDER / VECTORS[to]).read_bytes()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_checkpoint_through_a_pipe_gives_the_vector_whatever_the_hash_seed(seed: str, tmp_path: Path) -> None:
    torch.save(tensors_of_the_vector(), tmp_path / "checkpoint")
    program = "import stream_pack, sys\nstream_pack.convert(0, 1, metadata={'format': 'pt'}, spool_dir=sys.argv[1])"
    with subprocess.Popen(["cat", tmp_path / "checkpoint"], stdout=subprocess.PIPE) as producer:
        result = subprocess.run(
            [sys.executable, "-c", program, tmp_path],
            stdin=producer.stdout,
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
    assert result.stdout == VECTOR


DTYPES = ("bool", "<i1", "<u2", "<i4", "<f2", "<f4", "<f8", "<c8", "<u8")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, min_side=0))
)


# A NUL in a name is refused for a .ptd, and has a test of its own.
NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)


@given(tensors=st.dictionaries(NAMES, ARRAYS, max_size=8), to=KINDS)
def test_every_tensor_comes_back_bit_for_bit(
    tensors: dict[str, NDArray[np.generic]], to: To, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("foreign") / "pack"
    stream_pack.save_file(tensors, path, to=to, metadata={"key": "value"}, block_nbytes=4096)
    data = path.read_bytes()
    pack = read(data)
    assert (pack.kind, pack.nbytes) == (to, len(data))
    assert pack.metadata == {"key": "value"}
    assert list(pack.tensors) == list(tensors)
    for name, array in tensors.items():
        tensor = pack.tensors[name]
        assert (tensor.dtype, tensor.shape) == (array.dtype.name, array.shape)
        assert tensor.data == array.tobytes()
        assert tensor.file_offset % 256 == 0
    assert xxhash.xxh3_64_intdigest(pack.covered_head) == pack.head_checksum
    assert xxhash.xxh3_64_intdigest(pack.covered_by_root) == pack.root_checksum
    assert [xxhash.xxh3_64_intdigest(block) for block in pack.blocks] == pack.block_checksums


def test_the_parts_stand_where_the_text_says(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    # One byte more than two blocks, and a tensor large enough for a page.
    tensors = {"small": np.arange(8193, dtype=np.uint8), "large": np.full(1 << 20, 7, np.uint8)}
    stream_pack.save_file(tensors, path, block_nbytes=4096)
    data = path.read_bytes()
    region, region_nbytes = struct.unpack_from("<QQ", data, 8)
    assert region % 16384 == 0
    # 8193 bytes, then the next page, then a mebibyte.
    assert region_nbytes == 16384 + (1 << 20)
    assert read(data).tensors["large"].file_offset == region + 16384
    assert len(data) == region + region_nbytes + 8 * (3 + 256) + 24
    assert not any(data[region + 8193 : region + 16384])
