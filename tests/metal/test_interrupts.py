"""A Ctrl-C at the worst moment: it reaches the program, and what was to be released is released."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from ctypes import c_int, c_void_p
from pathlib import Path

import pytest

import stream_pack
from stream_pack.metal import Weights, interop
from tests.metal.bench import Bench, c_bench, c_library, compiler, gone

pytestmark = pytest.mark.filterwarnings("error")  # an exception that is ignored is a warning of pytest's
Interrupted = Callable[[Callable[[], object]], None]


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in with")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    library = ctypes.CDLL(str(c_library(tmp_path_factory.getbasetemp())))
    yield library
    c_int.in_dll(library, "standin_interrupts").value = 0
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def bench(library: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = c_bench(tmp_path_factory.getbasetemp())
    live = bench.live()
    yield bench
    gc.collect()
    bench.wait()
    assert bench.live() == live


@pytest.fixture
def interrupted(library: ctypes.CDLL) -> Interrupted:
    """Calls a function written in C just after a Ctrl-C, which must be raised afterwards."""

    def call(function: Callable[[], object]) -> None:
        callback = ctypes.CFUNCTYPE(None)(function)
        with pytest.raises(KeyboardInterrupt):
            library.standin_interrupted(callback, None)
            for _ in range(10):  # where a Ctrl-C is noticed
                pass

    return call


@pytest.fixture
def weights(bench: Bench, pack_path: Path) -> Weights:
    return stream_pack.metal.open(pack_path, device=bench.device())


def closes(bench: Bench, weights: Weights) -> None:
    """All buffers are released: the file can be unmapped."""
    weights._windows.clear()
    assert gone(bench, *(token for tokens in weights._made.values() for token in tokens))
    weights.close()


@pytest.mark.parametrize("when", ["before it is released", "before its deallocator"])
def test_a_buffer_is_released(
    bench: Bench, library: ctypes.CDLL, weights: Weights, interrupted: Interrupted, when: str
) -> None:
    held: list[object] = [weights.own_buffer("head")]
    if when == "before it is released":
        interrupted(held.clear)
    else:
        c_int.in_dll(library, "standin_interrupts").value = 1
        with pytest.raises(KeyboardInterrupt):
            held.clear()
            for _ in range(10):
                pass
        c_int.in_dll(library, "standin_interrupts").value = 0
    assert held == []
    closes(bench, weights)


def test_a_view_that_outlives_the_weights_unmaps_the_file(
    bench: Bench, weights: Weights, interrupted: Interrupted
) -> None:
    view = weights["head"]
    token = view.buffer.token
    held: list[object] = [view]
    weights.__exit__(None, None, None)
    del view, weights
    interrupted(held.clear)
    assert gone(bench, token)


def test_residency_is_ended(bench: Bench, pack_path: Path, interrupted: Interrupted) -> None:
    weights = stream_pack.metal.open(pack_path, device=bench.device(), residency=True)
    held: list[object] = [weights._residency]
    weights._residency = None
    interrupted(held.clear)
    closes(bench, weights)


def test_a_tensor_that_another_library_gives_back_releases_its_buffer(
    bench: Bench, library: ctypes.CDLL, weights: Weights, interrupted: Interrupted
) -> None:
    from tests.metal.test_interop import take

    with interop._lent().capsule(weights["head"]) as capsule:
        taken = take(capsule)
    address = ctypes.addressof(taken)
    with pytest.raises(KeyboardInterrupt):
        library.standin_interrupted(c_void_p(taken.deleter), c_void_p(address))
        for _ in range(10):
            pass
    assert address not in interop._lent().held
    closes(bench, weights)


def test_an_array_that_is_dropped_does_not_keep_a_pack_from_closing(pack_path: Path, interrupted: Interrupted) -> None:
    pack = stream_pack.open(pack_path)
    held: list[object] = [pack["head"].numpy()]
    interrupted(held.clear)
    pack.close()


@pytest.mark.skipif(sys.platform == "darwin", reason="the real PyTorch would use the stand-in's buffers")
def test_a_storage_that_keeps_a_buffer_lets_it_go(bench: Bench, weights: Weights, interrupted: Interrupted) -> None:
    import torch

    from stream_pack.metal.finalizers import keep_while

    storage = torch.zeros(3).untyped_storage()
    keep_while(storage, weights.own_buffer("head"))
    held: list[object] = [storage]
    del storage
    interrupted(held.clear)
    closes(bench, weights)
