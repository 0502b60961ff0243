"""The Objective-C runtime through C: messages, blocks, and what they keep alive."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from ctypes import c_bool, c_int, c_long, c_ulong, c_void_p
from pathlib import Path
from types import SimpleNamespace

import pytest

import stream_pack.metal
from stream_pack.errors import MetalUnavailable
from stream_pack.metal import objc
from stream_pack.metal.objc import MESSAGES, Messages
from tests.metal.bench import c_bench, c_library, compiler
from tests.metal.standin import Block, Invoke, StandIn


class Owner:
    """Something whose end can be watched."""


def dies(block: int) -> None:
    """The buffer that this block serves is gone, says Metal."""
    Invoke(Block.from_address(block).invoke)(block, 0x4000, 16)


def test_the_block_is_a_global_one_of_32_bytes_with_its_signature(standin: StandIn) -> None:
    token, address = objc.keep(standin.runtime, Owner())
    block = Block.from_address(address)
    assert block.isa == standin.runtime.global_block_class
    assert block.flags == 0x5000_0000
    assert block.descriptor.contents.reserved == 0
    assert block.descriptor.contents.nbytes == 32
    assert block.descriptor.contents.signature == b"v24@?0^v8Q16"
    objc.forget(token)


def test_a_block_serves_one_live_buffer_of_one_runtime_and_is_used_again(standin: StandIn) -> None:
    _, first = objc.keep(standin.runtime, Owner())
    _, second = objc.keep(standin.runtime, Owner())
    assert first != second
    dies(first)
    _, elsewhere = objc.keep(StandIn().runtime, Owner())
    _, third = objc.keep(standin.runtime, Owner())
    assert third == first != elsewhere
    for block in (second, third, elsewhere):
        dies(block)


def test_an_owner_is_kept_until_its_buffer_is_gone(standin: StandIn) -> None:
    owner = Owner()
    watched = weakref.ref(owner)
    token, block = objc.keep(standin.runtime, owner)
    other_token, other = objc.keep(standin.runtime, owner)
    del owner
    dies(other)
    assert (objc.kept(token), objc.kept(other_token)) == (True, False)
    assert watched() is not None
    dies(block)
    assert watched() is None
    assert not objc.kept(token)


@pytest.mark.parametrize("called", ["never", "before", "after"])
def test_of_a_buffer_that_was_not_made_nothing_is_kept_whether_its_deallocator_is_called_or_not(
    standin: StandIn, called: str
) -> None:
    lost = Owner()
    watched = weakref.ref(lost)
    token, block = objc.keep(standin.runtime, lost)
    del lost
    if called == "before":
        dies(block)
    live, other = objc.keep(standin.runtime, Owner())  # may have got the block
    objc.forget(token)
    assert watched() is None
    later, another = objc.keep(standin.runtime, Owner())
    if called == "after":
        dies(block)
    assert objc.kept(live)
    assert objc.kept(later)
    dies(other)
    dies(another)


def test_an_owner_is_dropped_on_the_thread_that_the_driver_happens_to_use(standin: StandIn) -> None:
    threads: list[threading.Thread] = []
    owner = Owner()
    weakref.finalize(owner, lambda: threads.append(threading.current_thread()))
    _, block = objc.keep(standin.runtime, owner)
    del owner
    driver = threading.Thread(target=dies, args=(block,))
    driver.start()
    driver.join()
    assert threads == [driver]


def test_an_owner_that_drops_other_buffers_while_it_goes_drops_them_all(standin: StandIn) -> None:
    class Chain:
        def __init__(self, next_block: int | None) -> None:
            self.next_block = next_block

        def __del__(self) -> None:
            if self.next_block is not None:
                dies(self.next_block)

    tokens: list[int] = []
    block: int | None = None
    for _ in range(5):
        token, block = objc.keep(standin.runtime, Chain(block))
        tokens.append(token)
    assert block is not None
    dies(block)
    assert not any(map(objc.kept, tokens))


def test_many_threads_keep_and_drop_without_losing_one(standin: StandIn) -> None:
    gone: list[int] = []
    before = len(objc._registry().owners)

    def work() -> None:
        for number in range(300):
            owner = Owner()
            weakref.finalize(owner, gone.append, number)
            _, block = objc.keep(standin.runtime, owner)
            del owner
            dies(block)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gone) == 8 * 300
    assert len(objc._registry().owners) == before


def test_blocks_are_used_again_however_many_buffers_there_are(standin: StandIn) -> None:
    registry = objc._registry()
    blocks = [objc.keep(standin.runtime, Owner())[1] for _ in range(100)]
    made = len(registry.blocks)
    for number in range(1000):
        dies(blocks[number * 37 % 100])
        blocks[number * 37 % 100] = objc.keep(standin.runtime, Owner())[1]
    for block in blocks:
        dies(block)
    assert len(set(blocks)) == 100
    assert len(registry.blocks) - made < 1000 / 2


def test_at_exit_blocks_call_a_function_that_does_nothing(standin: StandIn) -> None:
    registry, invoke = objc._registry(), objc._registry()._invoke
    token, block = objc.keep(standin.runtime, Owner())
    registry._retire()
    try:
        assert Block.from_address(block).invoke == ctypes.cast(ctypes.pythonapi.Py_IsInitialized, c_void_p).value
        dies(block)
        assert objc.kept(token)
    finally:
        registry._invoke = invoke
        for known in registry.blocks.values():
            known.invoke = invoke
    dies(block)
    assert not objc.kept(token)


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in with")
    return str(c_library(tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize(("loader", "milliseconds", "left"), [(ctypes.CDLL, 60_000, 0), (ctypes.PyDLL, 50, 1)])
def test_a_deallocator_waits_for_pythons_lock_so_nobody_may_hold_it_and_wait_for_the_gpu(
    library: str, tmp_path_factory: pytest.TempPathFactory, pack_path: Path,
    loader: type[ctypes.CDLL], milliseconds: int, left: int,
) -> None:  # fmt: skip
    # CDLL gives the lock away while it is in C, PyDLL keeps it, as torch.mps.synchronize() does.
    bench = c_bench(tmp_path_factory.getbasetemp())
    weights = stream_pack.metal.open(pack_path, device=bench.device())
    window = weights.windows[0]
    token, in_flight = window.token, c_void_p(window.pointer)
    ctypes.CDLL(library).objc_msgSend(in_flight, b"retain")
    del window
    weights.__exit__(None, None, None)
    assert objc.kept(token)
    release_and_wait = loader(library).standin_release_and_wait
    release_and_wait.restype = c_long
    assert release_and_wait(in_flight, c_long(milliseconds)) == left
    bench.wait()
    assert not objc.kept(token)


@pytest.mark.parametrize(("translated", "expected"), [(-1, False), (0, False), (1, True)])
def test_the_runtime_of_a_mac_is_found_in_its_libraries_with_coregraphics_loaded_first(
    library: str, monkeypatch: pytest.MonkeyPatch, translated: int, expected: bool
) -> None:
    standin = ctypes.CDLL(library)
    c_int.in_dll(standin, "standin_translated").value = translated
    loaded: list[str] = []

    def load(path: str) -> ctypes.CDLL:
        loaded.append(path)
        return standin

    monkeypatch.setattr(objc, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(ctypes, "CDLL", load)
    runtime = objc.native.__wrapped__()
    frameworks = "/System/Library/Frameworks"
    assert loaded[:2] == [f"{frameworks}/CoreGraphics.framework/CoreGraphics", f"{frameworks}/Metal.framework/Metal"]
    assert set(loaded[2:]) == {"/usr/lib/libobjc.A.dylib", "/usr/lib/libSystem.B.dylib"}
    assert runtime.translated is expected
    assert runtime.global_block_class == ctypes.addressof(c_void_p.in_dll(standin, "_NSConcreteGlobalBlock"))
    messages = Messages(runtime, MESSAGES)
    device = objc.default_device(runtime, messages)
    assert device is not None
    assert objc.string_at(messages, messages.send(device, "name")) == "Stand-in in C"


@pytest.mark.parametrize(
    ("encoding", "words", "result"),
    [
        ("Q@^vQQ@?", [2**40, 2**41, 2**63, 3, 4], 2**64 - 1),
        ("qq", [-1001], -(2**63)),
        ("Zq", [1007], True),
        ("@:", [5], None),
        ("vI", [0x9000_0010], None),
    ],
)
def test_a_message_passes_every_argument_whole(encoding: str, words: list[int], result: int | None) -> None:
    types = {"@": c_void_p, "^v": c_void_p, "Q": c_ulong, "q": c_long, ":": c_void_p, "@?": c_void_p, "Z": c_bool}
    kind = {"Q": c_ulong, "q": c_long, "Z": c_bool, "@": c_void_p, "v": None}[encoding[0]]
    arguments = {
        "Q@^vQQ@?": ("@", "^v", "Q", "Q", "@?"), "qq": ("q",), "Zq": ("q",), "@:": (":",), "vI": ("Q",)
    }[encoding]  # fmt: skip
    seen: list[int] = []

    def receive(receiver: int, selector: int, *rest: int) -> int | None:
        seen.extend(rest)
        return result

    function = ctypes.CFUNCTYPE(kind, c_void_p, c_void_p, *(types[a] for a in arguments))(receive)
    sender: Callable[..., object] = objc.prototype(encoding)(ctypes.cast(function, c_void_p).value or 0)
    assert sender(1, 2, *words) == result
    assert seen == words


def test_a_selector_that_is_not_in_the_table_cannot_be_sent(standin: StandIn) -> None:
    with pytest.raises(KeyError):
        Messages(standin.runtime, MESSAGES).send(1, "release:")


def test_python_runs_on_other_threads_while_a_message_is_on_its_way() -> None:
    # A C function that waits stands for a message that does: poll(descriptors, how many, milliseconds at most).
    reader, writer = os.pipe()
    descriptors = struct.pack("=ihh", reader, select.POLLIN, 0)
    words = ctypes.create_string_buffer(descriptors, len(descriptors))
    send = objc.prototype("qq")(ctypes.cast(ctypes.CDLL(None).poll, c_void_p).value or 0)
    about_to_send = threading.Event()

    def answer() -> None:
        about_to_send.wait()
        os.write(writer, b"!")

    other = threading.Thread(target=answer)
    other.start()
    about_to_send.set()
    assert send(ctypes.addressof(words), 1, 20_000) == 1, "the other thread could not run"
    other.join()
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac, which has it")
def test_there_is_no_objective_c_elsewhere() -> None:
    with pytest.raises(MetalUnavailable, match=sys.platform):
        objc.native()
