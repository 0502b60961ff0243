"""Every kind of checkpoint becomes the same pack whatever way it comes and goes, or is refused every way.

What takes long or needs processes is tested elsewhere: 70,000 storages, and every cut and flipped bit, in
``tests/sources/torch_save``; what producers do to a pipe in ``tests/cli/test_producers.py``; a full disk, a consumer
that dies and odd kinds of stdin in ``tests/cli/test_commands.py``; real packages in ``tests/interop``; 2 to 5 GiB,
bombs and memory in ``tests/large``; two ranks that read or write one checkpoint in
``tests/sources/sets/test_dcp.py`` and ``tests/writer/test_parallel.py``.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import stream_pack
from stream_pack.errors import LimitError, SourceError
from tests.sources.byte_sources import Dribble
from tests.sources.field.case import Case
from tests.sources.field.containers import CONTAINERS
from tests.sources.field.content import CONTENT, PLAIN
from tests.support.torch_zips import as_torch_has_it, saved

pytestmark = pytest.mark.filterwarnings("ignore")
"""Of torch, which says of some dtypes and layouts that they are experimental."""

CASES = [*CONTENT, *CONTAINERS]
PACKED = [case for case in CASES if case.tensors is not None]
REFUSED = [case for case in CASES if case.tensors is None]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.what)


def converted(source: Any, target: Any, case: Case, folder: Path) -> None:
    stream_pack.convert(source, target, spool_dir=folder, **case.options)


def assert_holds(path: Path, case: Case) -> None:
    """The pack has torch's own dtypes, shapes and bits, in the order of the checkpoint."""
    assert case.tensors is not None
    tensors = case.tensors()
    with stream_pack.open(path) as pack:
        assert list(pack) == list(tensors)
        for name, tensor in tensors.items():
            found = pack[name].torch()
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert as_torch_has_it(found) == as_torch_has_it(tensor), name


@named(PACKED)
def test_file_and_pipes_make_the_same_pack_of_the_very_tensors(case: Case, tmp_path: Path) -> None:
    data = case.build()
    source, target = tmp_path / "source", tmp_path / "pack"
    source.write_bytes(data)
    converted(source, target, case, tmp_path)
    assert_holds(target, case)
    expected = target.read_bytes()
    for given in (source, *(Dribble(data, step=step) for step in case.steps)):
        stream = io.BytesIO()
        converted(given, stream, case, tmp_path)
        assert stream.getvalue() == expected
    for step in case.steps:
        target.unlink()
        converted(Dribble(data, step=step), target, case, tmp_path)
        assert target.read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack", "source"]


@named(PLAIN)
def test_the_older_format_makes_the_same_pack(case: Case, tmp_path: Path) -> None:
    assert case.tensors is not None
    legacy = saved(case.tensors(), _use_new_zipfile_serialization=False)
    packs = []
    for data in (case.build(), legacy):
        converted(Dribble(data, step=65536), tmp_path / "pack", case, tmp_path)
        packs.append((tmp_path / "pack").read_bytes())
    assert packs[0] == packs[1]


@named(REFUSED)
def test_what_is_refused_is_refused_every_way_and_leaves_nothing(case: Case, tmp_path: Path) -> None:
    data = case.build()
    source = tmp_path / "source"
    source.write_bytes(data)
    for given in (source, *(Dribble(data, step=step) for step in case.steps)):
        for target in (tmp_path / "pack", io.BytesIO()):
            if isinstance(given, Dribble):
                given.taken = 0
            with pytest.raises((SourceError, LimitError), match=f"(?s){case.refusal}"):
                converted(given, target, case, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_no_two_cases_have_one_name() -> None:
    names = [case.what for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_torch_reads_what_it_is_said_to_have_written() -> None:
    """The table's own tensors are those of the checkpoints, as torch reads them."""
    for case in PLAIN:
        assert case.tensors is not None
        found = torch.load(io.BytesIO(case.build()), weights_only=True)
        for name, tensor in case.tensors().items():
            assert as_torch_has_it(found[name]) == as_torch_has_it(tensor), name
