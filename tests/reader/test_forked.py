"""A forked child uses a pack that its parent has open, whatever threads of the parent were doing with it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stream_pack
from tests.support.forks import in_a_forked_child

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

TENSORS = {"a": torch.arange(3000.0), "b": torch.arange(5000, 8000.0)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    stream_pack.save_file(TENSORS, tmp_path / "pack")
    return tmp_path / "pack"


def equal(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
    assert tensor.tolist() == wanted.tolist()


def uses(pack: stream_pack.Pack) -> list[Callable[[], object]]:
    """What a worker does."""
    return [
        lambda: equal(pack["a"].torch(), TENSORS["a"]),
        lambda: equal(pack["b"].torch(), TENSORS["b"]),
        lambda: equal(torch.from_numpy(pack["b"].numpy(writable=True)), TENSORS["b"]),
        lambda: pack.verify(),
        lambda: pack.close(),
        lambda: pack.__exit__(None, None, None),
        lambda: stream_pack.load_file(pack.path),
    ]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "preadv"),  # a block that is proved
        (mmap, "mmap"),  # a map that is made
        (os, "lseek"),  # the length that is checked
    ],
    ids=["reading", "mapping", "looking"],
)
@pytest.mark.parametrize("verify", ["never", "lazy"])
def test_a_child_never_waits_for_what_a_thread_of_its_parent_was_doing(
    owner: object, name: str, verify: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, verify) == ("preadv", "never"):
        return  # nothing is read
    there, go_on = threading.Event(), threading.Event()
    real = getattr(owner, name)

    class Slow:
        """Waits in every thread but the main one, with the locks that are held then."""

        def __call__(self, *args: object, **options: object) -> object:
            if threading.current_thread() is not threading.main_thread():
                there.set()
                go_on.wait(60)
            return real(*args, **options)

    with stream_pack.open(path, verify=verify) as pack:  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Slow())
            found: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: found.append(pack["a"].torch()))
            thread.start()
            assert there.wait(60)
            for use in uses(pack):
                assert in_a_forked_child(use) == "nothing"
            go_on.set()
            thread.join()
        equal(found[0], TENSORS["a"])
        equal(pack["b"].torch(), TENSORS["b"])


def test_a_child_that_closes_a_pack_gives_back_its_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a thread of the parent was reading by it."""
    there, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def slow(*args: object) -> int:
        if threading.current_thread() is not threading.main_thread():
            there.set()
            go_on.wait(60)
        return real(*args)  # type: ignore[arg-type]

    pack = stream_pack.open(path, verify="lazy")
    monkeypatch.setattr(os, "preadv", slow)
    thread = threading.Thread(target=lambda: pack["a"].numpy())
    thread.start()
    assert there.wait(60)

    def close() -> None:
        before = len(os.listdir("/proc/self/fd"))
        pack.close()
        assert len(os.listdir("/proc/self/fd")) < before

    assert in_a_forked_child(close) == "nothing"
    go_on.set()
    thread.join()
    pack.close()


def test_workers_of_a_data_loader_share_the_pack_of_their_parent(path: Path) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.pack = stream_pack.open(path, verify="lazy")

        def __len__(self) -> int:
            return len(self.pack)

        def __getitem__(self, number: int) -> torch.Tensor:
            return self.pack[list(self.pack)[number]].torch().clone()

    rows = Rows()
    batches = list(DataLoader(rows, batch_size=1, num_workers=2, multiprocessing_context="fork"))
    assert [batch.tolist() for batch in batches] == [[tensor.tolist()] for tensor in TENSORS.values()]
    rows.pack.close()
