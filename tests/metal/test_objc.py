"""The Objective-C runtime through C: messages, the one block, and what it keeps alive."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from ctypes import c_bool, c_long, c_ulong, c_void_p

import pytest

from stream_pack.errors import MetalUnavailable
from stream_pack.metal import objc
from stream_pack.metal.objc import MESSAGES, Messages
from tests.metal.standin import Block, Invoke, StandIn


class Owner:
    """Something whose end can be watched."""


def dies(standin: StandIn, address: int, nbytes: int) -> None:
    """A buffer over this range is gone, says Metal."""
    block = objc.deallocator(standin.runtime)
    Invoke(Block.from_address(block).invoke)(block, address, nbytes)


def test_the_block_is_a_global_one_of_32_bytes_with_its_signature(standin: StandIn) -> None:
    block = Block.from_address(objc.deallocator(standin.runtime))
    assert block.isa == standin.runtime.global_block_class
    assert block.flags == 0x5000_0000
    assert block.descriptor.contents.reserved == 0
    assert block.descriptor.contents.nbytes == 32
    assert block.descriptor.contents.signature == b"v24@?0^v8Q16"


def test_there_is_one_block_for_a_runtime_for_ever(standin: StandIn) -> None:
    block = objc.deallocator(standin.runtime)
    gc.collect()
    assert objc.deallocator(standin.runtime) == block
    assert objc.deallocator(StandIn().runtime) != block


def test_an_owner_is_kept_until_its_buffer_is_gone(standin: StandIn) -> None:
    owner = Owner()
    watched = weakref.ref(owner)
    objc.keep(0x4000, 16, owner)
    del owner
    assert watched() is not None
    dies(standin, 0x4000, 32)
    dies(standin, 0x8000, 16)
    assert watched() is not None
    dies(standin, 0x4000, 16)
    assert watched() is None
    assert objc.kept(0x4000, 16) == 0


def test_buffers_over_one_range_are_counted(standin: StandIn) -> None:
    for _ in range(3):
        objc.keep(0x4000, 16, Owner())
    for left in (2, 1, 0, 0):
        dies(standin, 0x4000, 16)
        assert objc.kept(0x4000, 16) == left


def test_an_owner_is_dropped_on_the_thread_that_the_driver_happens_to_use(standin: StandIn) -> None:
    threads: list[threading.Thread] = []
    owner = Owner()
    weakref.finalize(owner, lambda: threads.append(threading.current_thread()))
    objc.keep(0x4000, 16, owner)
    del owner
    driver = threading.Thread(target=dies, args=(standin, 0x4000, 16))
    driver.start()
    driver.join()
    assert threads == [driver]


def test_a_deallocator_never_waits_for_whoever_is_at_work_in_the_registry(standin: StandIn) -> None:
    # It may interrupt its own thread there, when a collection drops a buffer: waiting would be for ever.
    registry = objc._registry()
    owner = Owner()
    watched = weakref.ref(owner)
    objc.keep(0x4000, 16, owner)
    del owner
    block = objc.deallocator(standin.runtime)
    with registry._lock:
        Invoke(Block.from_address(block).invoke)(block, 0x4000, 16)
        assert watched() is not None
    objc.keep(0x8000, 16, Owner())
    assert watched() is None
    objc.forget(0x8000, 16)


def test_an_owner_that_drops_other_buffers_while_it_goes_drops_them_all(standin: StandIn) -> None:
    class Chain:
        def __init__(self, nexts: int) -> None:
            self.nexts = nexts

        def __del__(self) -> None:
            if self.nexts:
                dies(standin, 0x4000 * self.nexts, 16)

    for nexts in range(5):
        objc.keep(0x4000 * (nexts + 1), 16, Chain(nexts))
    dies(standin, 0x4000 * 5, 16)
    assert [objc.kept(0x4000 * (n + 1), 16) for n in range(5)] == [0] * 5


def test_many_threads_keep_and_drop_without_losing_one(standin: StandIn) -> None:
    gone: list[int] = []

    def work(thread: int) -> None:
        for number in range(300):
            owner = Owner()
            weakref.finalize(owner, gone.append, number)
            objc.keep(0x4000 * (number % 3), 16, owner)
            del owner
            dies(standin, 0x4000 * (number % 3), 16)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    objc.keep(1, 1, Owner())
    objc.forget(1, 1)
    assert len(gone) == 8 * 300
    assert [objc.kept(0x4000 * n, 16) for n in range(3)] == [0, 0, 0]


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
def test_a_message_passes_every_argument_whole(
    encoding: str, words: list[int], result: int | None
) -> None:
    types = {
        "@": c_void_p,
        "^v": c_void_p,
        "Q": c_ulong,
        "q": c_long,
        ":": c_void_p,
        "@?": c_void_p,
        "Z": c_bool,
    }
    kind = {"Q": c_ulong, "q": c_long, "Z": c_bool, "@": c_void_p, "v": None}[encoding[0]]
    arguments = {
        "Q@^vQQ@?": ("@", "^v", "Q", "Q", "@?"), "qq": ("q",), "Zq": ("q",), "@:": (":",), "vI": ("Q",)
    }[encoding]  # fmt: skip
    seen: list[int] = []

    def receive(receiver: int, selector: int, *rest: int) -> int | None:
        seen.extend(rest)
        return result

    function = ctypes.CFUNCTYPE(kind, c_void_p, c_void_p, *(types[a] for a in arguments))(receive)
    sender: Callable[..., object] = objc.prototype(encoding)(
        ctypes.cast(function, c_void_p).value or 0
    )
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
