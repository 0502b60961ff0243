"""Files of ExecuTorch's beyond 4 GiB, as sparse files: every position has 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack import RawPayloadError
from stream_pack.format.header_kinds import KINDS
from stream_pack.inspection.inspect import inspect
from stream_pack.reader.verify import verify
from tests.support.et_files import Constant, Delegate, Named, mps_payload, program, ptd

FAR = (9 << 29) + 64  # 4.5 GiB, and not on a page
VALUES = np.array([1.5, -2.0, 3.25, 4.0], np.float32)
FLOAT = 6  # ScalarType


def sparse(path: Path, parts: dict[int, bytes]) -> Path:
    """A file of these bytes, with holes between them."""
    with path.open("wb") as file:
        for at, data in parts.items():
            file.seek(at)
            file.write(data)
    return path


def payload(path: Path) -> Path:
    constants = [Constant((2,), 0), Constant((4,), FAR)]
    head = mps_payload(constants, b"", region_nbytes=FAR + 16)
    return sparse(path, {0: head, len(head) + FAR: VALUES.tobytes()})


def data_file(path: Path) -> Path:
    named = [Named("near", 0, FLOAT, (2,), (0,)), Named("far", 1, FLOAT, (4,), (0,))]
    head = ptd(named, [(0, 8), (FAR, 16)], region=1024, region_nbytes=FAR + 16)
    return sparse(path, {0: head, 1024 + FAR: VALUES.tobytes()})


def program_file(path: Path) -> Path:
    """The first payload's constants reach beyond 4 GiB, the second payload and named data stand there."""
    first = mps_payload([Constant((4,), FAR)], b"", region_nbytes=FAR + 16)
    second = mps_payload([Constant((4,), 0)], VALUES[::-1].tobytes())
    third = VALUES.tobytes()
    lengths = (len(first) + FAR + 16, len(second), len(third))
    offsets = (0, lengths[0], lengths[0] + lengths[1])
    head = program(
        [Delegate(0), Delegate(1)],
        list(zip(offsets, lengths, strict=True)),
        named=[Named("key", 2)],
        base=1024,
        segments_nbytes=sum(lengths),
    )
    return sparse(path, {0: head + first, 1024 + len(first) + FAR: VALUES.tobytes() + second + third})


MAKE: dict[str, Callable[[Path], Path]] = {"mps": payload, "ptd": data_file, "pte": program_file}


@pytest.mark.parametrize("kind", MAKE)
def test_what_fills_it_adds_up_and_no_fault_is_seen(kind: str, tmp_path: Path) -> None:
    path = MAKE[kind](tmp_path / kind)
    description = inspect(path)
    assert description is not None
    assert sum(part.nbytes for part in description.parts) == path.stat().st_size > 2**32
    assert max(row.file_offset or 0 for row in description.rows) > 2**32
    assert description.faults == ()
    with pytest.raises(RawPayloadError, match="no fault"):
        verify(path)


@pytest.mark.parametrize(("kind", "name"), [("mps", "1"), ("ptd", "far")])
def test_a_constant_beyond_4_gib_opens(kind: str, name: str, tmp_path: Path) -> None:
    with stream_pack.open(MAKE[kind](tmp_path / kind), kind=KINDS[kind].name) as pack:
        assert pack[name].file_offset > 2**32
        assert np.array_equal(pack[name].numpy(), VALUES)
        assert pack[name].torch().tolist() == VALUES.tolist()


def test_constants_beyond_4_gib_convert(tmp_path: Path) -> None:
    expected = {
        "mps": {"0": [0, 0], "1": VALUES.tolist()},
        "ptd": {"near": [0, 0], "far": VALUES.tolist()},
        "pte": {
            "forward/0/0": VALUES.tolist(),
            "forward/1/0": VALUES[::-1].tolist(),
            "key": VALUES.view(np.uint8).tolist(),
        },
    }
    for kind, constants in expected.items():
        path = MAKE[kind](tmp_path / kind)
        report = stream_pack.convert(path, tmp_path / "pack")
        assert report.source_nbytes < 64
        with stream_pack.open(tmp_path / "pack") as pack:
            assert {name: view.numpy().tolist() for name, view in pack.items()} == constants
        path.unlink()
