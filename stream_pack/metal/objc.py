"""The Objective-C runtime, through ctypes: the only module that uses it.

:class:`Runtime` holds the addresses of the few C functions needed, so that tests can pass another;
:class:`Messages` sends messages through them, each selector with its one prototype; :func:`keep` returns the block that
Metal calls when a buffer is freed, which drops the buffer's owner.

Everything that Metal may call is kept until the process ends: the blocks (one per buffer, reused once that is freed),
one callback, and the registry of owners.  A block on the stack, or one that Python had collected, would crash when a
buffer is freed later than expected.

The callback is a function of Python's that is written in C: one written in Python could be interrupted by a Ctrl-C
before it does anything.  It waits for Python's lock.  A thread that holds the lock while it waits for Metal to finish
with a buffer deadlocks if the last reference to the buffer is released meanwhile.  And C code that releases the last
reference while a Python exception propagates loses the exception; Python code may release it.
Source: Clang, "Block Implementation Specification"; Apple, "Objective-C Runtime".
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_int, c_long, c_uint32, c_ulong, c_void_p
from dataclasses import dataclass
from typing import Any

from stream_pack.errors import MetalUnavailable

__all__ = [
    "MESSAGES",
    "Messages",
    "Runtime",
    "default_device",
    "first_process",
    "forget",
    "immortal",
    "keep",
    "kept",
    "native",
    "string_at",
]


@dataclass(frozen=True, slots=True)
class Runtime:
    """The C entry points of a Metal system, as addresses.

    ``global_block_class`` is the address of ``_NSConcreteGlobalBlock`` itself.  ``translated``: Rosetta runs this
    process.
    """

    msg_send: int
    sel_register_name: int
    get_class: int
    create_system_default_device: int
    global_block_class: int
    translated: bool


@functools.cache
def native() -> Runtime:
    """The runtime of this Mac.  Raises: MetalUnavailable anywhere else."""
    if sys.platform != "darwin":
        raise MetalUnavailable(
            f"Metal is available only on Apple systems (this is {sys.platform}); `stream-pack metal-plan` predicts "
            "how a Mac will use a pack"
        )
    # Without CoreGraphics loaded, MTLCreateSystemDefaultDevice returns nil (so its documentation).
    ctypes.CDLL("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics")
    metal = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
    objc = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
    system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    return Runtime(
        msg_send=_address(objc.objc_msgSend),
        sel_register_name=_address(objc.sel_registerName),
        get_class=_address(objc.objc_getClass),
        create_system_default_device=_address(metal.MTLCreateSystemDefaultDevice),
        global_block_class=ctypes.addressof(c_void_p.in_dll(system, "_NSConcreteGlobalBlock")),
        translated=_translated(system),
    )


def _translated(system: ctypes.CDLL) -> bool:
    """Whether Rosetta runs this process.  Source: Apple, "About the Rosetta translation environment"."""
    value, nbytes = c_int(0), c_ulong(ctypes.sizeof(c_int))
    failed = system.sysctlbyname(b"sysctl.proc_translated", ctypes.byref(value), ctypes.byref(nbytes), None, c_ulong(0))
    # Macs without Rosetta do not have the name.
    return failed == 0 and value.value == 1


def _address(function: Any) -> int:
    address = ctypes.cast(function, c_void_p).value
    assert address is not None
    return address


MESSAGES: dict[str, str] = {
    # selector: type of the result, then of each argument after receiver and selector
    "UTF8String": "*",
    "addAllocation:": "v@",
    "commit": "v",
    "contents": "^v",
    "drain": "v",
    "endResidency": "v",
    "hasUnifiedMemory": "Z",
    "maxBufferLength": "Q",
    "name": "@",
    "new": "@",
    "newBufferWithBytesNoCopy:length:options:deallocator:": "@^vQQ@?",
    "newResidencySetWithDescriptor:error:": "@@^@",
    "recommendedMaxWorkingSetSize": "Q",
    "release": "v",
    "removeAllAllocations": "v",
    "requestResidency": "v",
    "respondsToSelector:": "Z:",
    "retain": "@",
    "supportsFamily:": "Zq",
}
"""Every message this package sends, in Objective-C's type encoding (``Z`` is BOOL, as pyobjc writes it)."""

_TYPES: dict[str, Any] = {
    "@?": c_void_p,
    "^v": c_void_p,
    "^@": c_void_p,
    "@": c_void_p,
    ":": c_void_p,
    "*": c_char_p,
    "Z": c_bool,
    "I": c_uint32,
    "Q": c_ulong,
    "q": c_long,
    "v": None,
}


@functools.cache
def prototype(encoding: str) -> Callable[[int], Callable[..., Any]]:
    """The C function type of a message.  Never variadic: on arm64 those pass their arguments elsewhere."""
    result, *arguments = (_TYPES[code] for code in re.findall(r"@\?|\^.|.", encoding))
    return ctypes.CFUNCTYPE(result, c_void_p, c_void_p, *arguments)


class Messages:
    """Sends the messages of a table (selector: encoding) through one runtime.

    Python's lock is released during a message, so that a deallocator on another thread can run.
    """

    def __init__(self, runtime: Runtime, table: dict[str, str]) -> None:
        self._get_class = ctypes.CFUNCTYPE(c_void_p, c_char_p)(runtime.get_class)
        register = ctypes.CFUNCTYPE(c_void_p, c_char_p)(runtime.sel_register_name)
        self._selectors = {name: register(name.encode()) for name in table}
        self._functions = {name: prototype(code)(runtime.msg_send) for name, code in table.items()}
        self._pool_class = self._get_class(b"NSAutoreleasePool")
        self._drain = prototype("v@")(runtime.msg_send)  # with an argument, which the method does not look at

    def send(self, receiver: int, selector: str, *arguments: Any) -> Any:
        """The result of ``[receiver selector: arguments]``; an object is its address, nil is None."""
        return self._functions[selector](receiver, self._selectors[selector], *arguments)

    def responds(self, receiver: int, selector: str) -> bool:
        """Whether this version of the system has the message."""
        return bool(self.send(receiver, "respondsToSelector:", self._selectors[selector]))

    def new(self, name: str) -> int | None:
        """An object of a class, owned by the caller; None where the system has no such class."""
        found = self._get_class(name.encode())
        made: int | None = self.send(found, "new") if found else None
        return made

    @contextmanager
    def pool(self) -> Iterator[None]:
        """Objects autoreleased inside are released at the end, not when the thread ends."""
        pool = self.send(self._pool_class, "new")
        try:
            yield
        finally:
            self.send(pool, "drain")

    def last(self, receiver: int, *selectors: str) -> Callable[[], None]:
        """A call that sends messages without arguments or results, each in a pool of its own; called again, nothing.

        No Python code runs in it, as :mod:`stream_pack.metal.finalizers` requires: ``map`` makes a pool, sends a
        message, and passes pool and result to ``drain``, as often as there are messages.
        """
        pools = itertools.starmap(
            self._functions["new"], itertools.repeat((self._pool_class, self._selectors["new"]), len(selectors))
        )
        results = itertools.starmap(
            self._functions["release"], [(receiver, self._selectors[selector]) for selector in selectors]
        )
        drained = map(self._drain, pools, itertools.repeat(self._selectors["drain"]), results)
        return functools.partial(deque(maxlen=0).extend, drained)


def default_device(runtime: Runtime, messages: Messages) -> int | None:
    """The system's default MTLDevice, owned by the caller, or None."""
    with messages.pool():
        device: int | None = ctypes.CFUNCTYPE(c_void_p)(runtime.create_system_default_device)()
    return device


def string_at(messages: Messages, string: int | None) -> str:
    """The text of an NSString."""
    text = messages.send(string, "UTF8String") if string else None
    return text.decode(errors="replace") if text else ""


def immortal(value: object) -> None:
    """Keep a Python object until the process ends, also while the interpreter deletes its modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


class _Descriptor(ctypes.Structure):
    _fields_ = (("reserved", c_ulong), ("nbytes", c_ulong), ("signature", c_char_p))


class _Block(ctypes.Structure):
    _fields_ = (
        ("isa", c_void_p),
        ("flags", c_int),
        ("reserved", c_int),
        ("invoke", c_void_p),
        ("descriptor", ctypes.POINTER(_Descriptor)),
    )


_IS_GLOBAL, _HAS_SIGNATURE = 1 << 28, 1 << 30
# void (^)(void *pointer, NSUInteger length): 24 bytes of arguments; the block at 0, pointer at 8, length at 16.
_SIGNATURE = b"v24@?0^v8Q16"
# Of these arguments the callback takes only the block; who calls it need not know.
_Invoke = ctypes.CFUNCTYPE(None, c_void_p)
_BLOCK = (1 << 64) - 1
_NOBODY = -1


class _Registry:
    """The owner of each buffer's memory: ``owners``, by the block that Metal calls when the buffer is freed.

    What it calls is ``owners.pop``.  There is no lock that it could have to wait for: an entry of ``owners`` claims its
    block, which serves one buffer at a time, and is not reused after a buffer that Metal did not create until the late
    call has come.  ``owners`` has the buffer's token beside the owner: a number that was never used before, with the
    block in its low 64 bits.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.owners: dict[int, tuple[int, object]] = {}
        self.blocks: dict[int, _Block] = {}  # by address, all that were ever made
        self._rings: dict[int, deque[int]] = {}  # blocks, by their class; the one used longest ago comes first
        self._counter = itertools.count()
        self._callback = _Invoke(self.owners.pop)
        self._invoke = _address(self._callback)
        self._descriptor = _Descriptor(0, ctypes.sizeof(_Block), _SIGNATURE)
        immortal(self)
        atexit.register(self._retire)

    def add(self, isa: int, owner: object) -> tuple[int, int]:
        ring = self._rings.setdefault(isa, deque())
        # A few tries, so that the cost does not grow with the number of buffers.
        for _ in range(min(8, len(ring))):
            block = ring[0]
            ring.rotate(-1)
            token = self._claim(block, owner)
            if token is not None:
                return token, block
        block = self._new_block(isa)
        token = self._claim(block, owner)
        assert token is not None
        ring.append(block)
        return token, block

    def _claim(self, block: int, owner: object) -> int | None:
        token = next(self._counter) << 64 | block
        entry = token, owner
        return token if self.owners.setdefault(block, entry) is entry else None

    def _new_block(self, isa: int) -> int:
        flags = _IS_GLOBAL | _HAS_SIGNATURE
        block = _Block(isa, flags, 0, None, ctypes.pointer(self._descriptor))
        address = ctypes.addressof(block)
        self.blocks[address] = block
        # Last: at exit, either this reads the new value, or the block is found and changed.
        block.invoke = self._invoke
        return address

    def remove(self, token: int) -> None:
        if self.has(token):
            self.owners[token & _BLOCK] = _NOBODY, None

    def has(self, token: int) -> bool:
        return self.owners.get(token & _BLOCK, (_NOBODY, None))[0] == token

    def _retire(self) -> None:
        """Let the blocks call a C function that does nothing, instead of an interpreter that has ended."""
        self._invoke = _address(ctypes.pythonapi.Py_IsInitialized)
        for block in list(self.blocks.values()):
            block.invoke = self._invoke


@functools.cache
def _registry() -> _Registry:
    return _Registry()


def first_process() -> int:
    """The process that may use Metal: the first that asks, and no fork of it."""
    return _registry().pid


def keep(runtime: Runtime, owner: object) -> tuple[int, int]:
    """Keep ``owner`` until a buffer is freed: its token, and the address of the block to pass as its deallocator."""
    return _registry().add(runtime.global_block_class, owner)


def forget(token: int) -> None:
    """Undo :func:`keep`: no buffer was created, whether its deallocator was called or not."""
    _registry().remove(token)


def kept(token: int) -> bool:
    """Whether the buffer is still alive."""
    return _registry().has(token)
