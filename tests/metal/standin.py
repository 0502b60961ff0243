"""A Metal system in Python, behind the C ABI: ``objc_msgSend`` and its kin as C function pointers.

It enforces what Apple's documentation demands of ``newBufferWithBytesNoCopy``, counts references as Objective-C does,
calls deallocator blocks as the block ABI says, and copies when a blit is committed.  What was done wrong is listed in
:attr:`StandIn.violations`, because an exception cannot cross C.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_ulong, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

from stream_pack.metal.objc import Runtime

__all__ = ["BLIT_MESSAGES", "StandIn"]

BLIT_MESSAGES = {
    "newBufferWithLength:options:": "@QQ",
    "newCommandQueue": "@",
    "commandBuffer": "@",
    "blitCommandEncoder": "@",
    "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:": "v@Q@QQ",
    "endEncoding": "v",
    "waitUntilCompleted": "v",
    "status": "Q",
}
"""What a program that uses the buffers sends; the package itself never does."""

COMPLETED = 4  # MTLCommandBufferStatusCompleted


class Descriptor(ctypes.Structure):
    _fields_ = (("reserved", c_ulong), ("nbytes", c_ulong), ("signature", c_char_p))


class Block(ctypes.Structure):
    """Clang's Block ABI, a literal without copy and dispose helpers."""

    _fields_ = (
        ("isa", c_void_p),
        ("flags", c_int),
        ("reserved", c_int),
        ("invoke", c_void_p),
        ("descriptor", ctypes.POINTER(Descriptor)),
    )


Invoke = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_ulong)


_ALL: list[object] = []


@dataclass(eq=False)
class Object:
    """An Objective-C object: its class, how often it is retained, and what it retains itself."""

    kind: str
    references: int = 1
    holds: list[int] = field(default_factory=list)
    address: int = 0
    nbytes: int = 0
    block: int | None = None
    memory: ctypes.Array[ctypes.c_char] | None = None
    copies: list[tuple[int, int, int]] = field(default_factory=list)


class StandIn:
    """One device.  ``nil``: it makes no buffers; ``deallocates``: but calls their deallocators.  Units: bytes."""

    def __init__(
        self,
        *,
        max_buffer_length: int = 1 << 34,
        working_set: int = 1 << 40,
        unified: bool = True,
        device: bool = True,
        families: frozenset[int] = frozenset({1007}),
        macos: int = 15,
        translated: bool = False,
        nil: bool = False,
        deallocates: bool = False,
    ) -> None:
        self.max_buffer_length = max_buffer_length
        self.working_set = working_set
        self.unified = unified
        self.families = families
        self.macos = macos
        self.nil = nil
        self.deallocates = deallocates
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.resident: list[int] = []
        self.requested: list[int] = []
        self._objects: dict[int, Object] = {}
        self._pools: list[list[int]] = [[]]
        self._selectors: dict[int, str] = {}
        self._strings: list[object] = []
        self._classes: dict[int, str] = {}
        self._block_class = ctypes.create_string_buffer(256)
        identity = c_void_p
        # Eight words: a message with fewer arguments leaves the rest undefined, and nobody looks at them.
        send = ctypes.CFUNCTYPE(identity, *[c_void_p] * 8)(self._send)
        register = ctypes.CFUNCTYPE(identity, c_char_p)(self._register)
        get_class = ctypes.CFUNCTYPE(identity, c_char_p)(self._get_class)

        def new_device() -> int | None:
            self._autoreleased("string")
            return self._new("device") if device else None

        create = ctypes.CFUNCTYPE(identity)(new_device)
        # Whoever has the addresses may call: like the real one, it is there as long as the process.
        _ALL.append(self)
        self._functions = (send, register, get_class, create)
        addresses = [ctypes.cast(function, c_void_p).value or 0 for function in self._functions]
        self.runtime = Runtime(
            msg_send=addresses[0],
            sel_register_name=addresses[1],
            get_class=addresses[2],
            create_system_default_device=addresses[3],
            global_block_class=ctypes.addressof(self._block_class),
            translated=translated,
        )

    def live(self) -> int:
        """How many buffers without a copy are alive."""
        return sum(o.kind == "buffer" and o.block is not None for o in self._objects.values())

    def retain(self, pointer: int) -> None:
        """Hold an object, as a command buffer in flight does."""
        self._objects[pointer].references += 1

    def release(self, pointer: int) -> None:
        """Let go of it."""
        thing = self._objects[pointer]
        thing.references -= 1
        if thing.references < 0:
            self.violations.append(f"{thing.kind} released too often")
        if thing.references:
            return
        del self._objects[pointer]
        for held in thing.holds:
            self.release(held)
        if thing.block is not None:
            block = Block.from_address(thing.block)
            Invoke(block.invoke)(thing.block, thing.address, thing.nbytes)

    def wait(self) -> None:
        """Until all deallocators have run: they run at once."""

    def _new(self, kind: str) -> int:
        handle = ctypes.create_string_buffer(16)
        self._strings.append(handle)
        pointer = ctypes.addressof(handle)
        self._objects[pointer] = Object(kind)
        return pointer

    def _autoreleased(self, kind: str) -> int:
        """Whatever works inside Metal may autorelease something."""
        if len(self._pools) == 1:
            self.violations.append(f"a {kind} autoreleased where there is no pool, so it leaks")
        pointer = self._new(kind)
        self._pools[-1].append(pointer)
        return pointer

    def _register(self, name: bytes) -> int:
        for address, known in self._selectors.items():
            if known == name.decode():
                return address
        text = ctypes.create_string_buffer(name)
        self._strings.append(text)
        self._selectors[ctypes.addressof(text)] = name.decode()
        return ctypes.addressof(text)

    def _get_class(self, name: bytes) -> int | None:
        if name == b"MTLResidencySetDescriptor" and self.macos < 15:
            return None
        pointer = self._new("class")
        self._classes[pointer] = name.decode()
        return pointer

    def _send(self, receiver: int, selector: int, *words: int | None) -> int | None:
        try:
            name = self._selectors[selector]
            self.calls.append(name)
            if receiver not in self._objects:
                self.violations.append(f"{name} sent to {receiver}, which is no object (any more)")
                return None
            handler: Callable[..., int | None] = _HANDLERS[name]
            return handler(self, receiver, *[word or 0 for word in words])
        except BaseException as error:
            self.violations.append(repr(error))
            return None

    def _wrap(self, _: int, address: int, nbytes: int, options: int, block: int, *__: int) -> int | None:
        wrong = [
            problem
            for problem, applies in (
                ("pointer is not page-aligned", address % mmap.PAGESIZE),
                ("length is not a multiple of the page", nbytes % mmap.PAGESIZE),
                ("length is 0", nbytes == 0),
                ("longer than maxBufferLength", nbytes > self.max_buffer_length),
                ("storage mode is not shared with default caching", options != 0),
                ("not inside one shared read-only mapping", not _mapped(address, nbytes)),
                ("not a global block", not self._is_global_block(block)),
            )
            if applies
        ]
        self.violations += wrong
        self._autoreleased("string")
        if self.nil and self.deallocates:
            Invoke(Block.from_address(block).invoke)(block, address, nbytes)
        if wrong or self.nil:
            return None
        pointer = self._new("buffer")
        thing = self._objects[pointer]
        thing.address, thing.nbytes, thing.block = address, nbytes, block
        return pointer

    def _is_global_block(self, address: int) -> bool:
        block = Block.from_address(address)
        descriptor = block.descriptor.contents
        return bool(
            block.isa == ctypes.addressof(self._block_class)
            and block.flags == (1 << 28 | 1 << 30)
            and descriptor.nbytes == ctypes.sizeof(Block) == 32
            and descriptor.signature == b"v24@?0^v8Q16"
        )

    def _allocate(self, _: int, nbytes: int, options: int, *__: int) -> int:
        pointer = self._new("buffer")
        thing = self._objects[pointer]
        thing.memory = ctypes.create_string_buffer(nbytes)
        thing.address, thing.nbytes = ctypes.addressof(thing.memory), nbytes
        return pointer

    def _encoder(self, commands: int, *_: int) -> int:
        encoder = self._autoreleased("blit encoder")
        self._objects[encoder].holds.append(commands)
        self.retain(commands)
        return encoder

    def _copy(self, encoder: int, source: int, at: int, target: int, to: int, nbytes: int) -> None:
        if at % 4 or to % 4 or nbytes % 4:
            self.violations.append("a blit of offsets or lengths that are not multiples of 4")
        if at + nbytes > self._objects[source].nbytes or to + nbytes > self._objects[target].nbytes:
            self.violations.append("a blit outside a buffer")
            return
        commands = self._objects[self._objects[encoder].holds[0]]
        for buffer in (source, target):
            self.retain(buffer)
            commands.holds.append(buffer)
        begin, end = self._objects[source].address + at, self._objects[target].address + to
        commands.copies.append((end, begin, nbytes))

    def _commit(self, receiver: int, *_: int) -> None:
        thing = self._objects[receiver]
        for target, source, nbytes in thing.copies:
            ctypes.memmove(target, source, nbytes)
        if thing.kind == "residency set":
            self.resident = list(thing.holds)

    def _add(self, receiver: int, allocation: int, *_: int) -> None:
        self.retain(allocation)
        self._objects[receiver].holds.append(allocation)

    def _remove_all(self, receiver: int, *_: int) -> None:
        held, self._objects[receiver].holds = self._objects[receiver].holds, []
        for pointer in held:
            self.release(pointer)

    def _make(self, receiver: int, *_: int) -> int:
        name = self._classes[receiver]
        if name == "NSAutoreleasePool":
            self._pools.append([])
        return self._new(name)

    def _drain(self, receiver: int, *_: int) -> None:
        for pointer in self._pools.pop():
            self.release(pointer)
        self.release(receiver)

    def _residency_set(self, *_: int) -> int:
        self._autoreleased("string")
        return self._new("residency set")

    def _request(self, *_: int) -> None:
        self.requested = list(self.resident)

    def _responds(self, _: int, selector: int, *__: int) -> int:
        since = {"newResidencySetWithDescriptor:error:": 15}
        return int(self.macos >= since.get(self._selectors[selector], 0))

    def _text(self, *_: int) -> int:
        text = ctypes.create_string_buffer("Stand-in ✓".encode())
        self._strings.append(text)
        return ctypes.addressof(text)


def _mapped(address: int, nbytes: int) -> bool:
    """Whether the range lies in one mapping that is shared and read-only, as far as this system tells."""
    if sys.platform != "linux":
        return True
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        extent, permissions, _ = line.split(maxsplit=2)
        begin, end = (int(bound, 16) for bound in extent.split("-"))
        if begin <= address and address + nbytes <= end:
            return permissions == "r--s"
    return False


_HANDLERS: dict[str, Callable[..., int | None]] = {
    "UTF8String": StandIn._text,
    "addAllocation:": StandIn._add,
    "blitCommandEncoder": StandIn._encoder,
    "commandBuffer": lambda self, *_: self._autoreleased("command buffer"),
    "commit": StandIn._commit,
    "contents": lambda self, receiver, *_: self._objects[receiver].address,
    "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:": (
        lambda self, receiver, *words: self._copy(receiver, *words[:5])
    ),
    "drain": StandIn._drain,
    "endEncoding": lambda self, *_: None,
    "endResidency": lambda self, *_: self.resident.clear(),
    "hasUnifiedMemory": lambda self, *_: int(self.unified),
    "maxBufferLength": lambda self, *_: self.max_buffer_length,
    "name": lambda self, *_: self._autoreleased("string"),
    "new": StandIn._make,
    "newBufferWithBytesNoCopy:length:options:deallocator:": lambda self, *words: self._wrap(*words),
    "newBufferWithLength:options:": StandIn._allocate,
    "newCommandQueue": lambda self, *_: self._new("command queue"),
    "newResidencySetWithDescriptor:error:": StandIn._residency_set,
    "recommendedMaxWorkingSetSize": lambda self, *_: self.working_set,
    "release": lambda self, receiver, *_: self.release(receiver),
    "removeAllAllocations": StandIn._remove_all,
    "requestResidency": StandIn._request,
    "respondsToSelector:": StandIn._responds,
    "retain": lambda self, receiver, *_: self.retain(receiver) or receiver,
    "status": lambda self, *_: COMPLETED,
    "supportsFamily:": lambda self, _, family, *__: int(family in self.families),
    "waitUntilCompleted": lambda self, *_: None,
}
