"""The GPU: what it allows, and MTLBuffers over memory that is already there."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import MetalBufferError, MetalUnavailable
from stream_pack.metal import objc
from stream_pack.metal.objc import Messages, Runtime
from stream_pack.metal.rules import IOS_HINT, check_range

__all__ = ["Buffer", "Device", "Residency", "require_own_process"]

STORAGE_MODE_SHARED = 0
"""MTLResourceStorageModeShared, with the default cache mode: the CPU reads too, for checksums."""

FAMILY_APPLE7 = 1007
"""MTLGPUFamilyApple7: the M1; no older GPU of Apple's is in a Mac."""


class Buffer:
    """An MTLBuffer over memory that something else owns.

    ``pointer`` is the ``id<MTLBuffer>``, to be passed to any API that takes one; ``address`` and ``nbytes`` say where
    it stands; ``token`` is its name for :func:`objc.kept`.

    Copies: none; writing to it, from CPU or GPU, is undefined (the memory is a file mapped read-only).
    Lifetime: this object holds one reference, and gives it back when it is collected.  The memory stays until Metal
    says that the last reference is gone, one held by a command buffer in flight too.
    Metal says so to Python, and waits for Python's lock.  Code that keeps the lock while it waits for the GPU, as
    ``torch.mps.synchronize()`` does, must not be called while only a command buffer holds the last reference, or both
    wait for ever: keep this object, the view or the tensor until after such a call.
    """

    __slots__ = ("__weakref__", "_messages", "_pid", "address", "nbytes", "pointer", "token")

    def __init__(
        self, messages: Messages, pointer: int, address: int, nbytes: int, token: int
    ) -> None:
        self.pointer = pointer
        self.address = address
        self.nbytes = nbytes
        self.token = token
        self._messages = messages
        self._pid = os.getpid()
        _give_back(self, messages, pointer, ("release",))

    def __repr__(self) -> str:
        return f"<Buffer {self.pointer:#x}, {self.nbytes} bytes at {self.address:#x}>"

    def contents(self) -> int:
        """What Metal says of the address; equal to ``address``, as long as nothing was copied."""
        require_own_process(self._pid)
        address: int = self._messages.send(self.pointer, "contents")
        return address


def _give_back(
    holder: object, messages: Messages, pointer: int, selectors: tuple[str, ...]
) -> weakref.finalize[..., object]:
    """Send ``selectors`` to an object once ``holder`` is collected: but not at exit, and not in a forked child."""
    finalizer = weakref.finalize(holder, _send_in, os.getpid(), messages, pointer, selectors)
    # At exit the driver may still be at work; the system takes everything back anyway.
    finalizer.atexit = False
    return finalizer


def _send_in(pid: int, messages: Messages, pointer: int, selectors: tuple[str, ...]) -> None:
    if os.getpid() == pid:
        with messages.pool():
            for selector in selectors:
                messages.send(pointer, selector)


def require_own_process(pid: int) -> None:
    """Raises: MetalUnavailable in a process that was forked from ``pid``, where Metal's objects mean nothing."""
    if os.getpid() != pid:
        raise MetalUnavailable(
            f"Metal was first used by process {pid}, which forked this one, and it does not survive fork; "
            "start processes with the 'spawn' method"
        )


class Device:
    """A GPU, by way of Metal.

    ``pointer`` is the ``id<MTLDevice>``.  Its properties are read when first asked for.
    Raises (whatever asks Metal): MetalUnavailable in a forked child.
    """

    def __init__(self, runtime: Runtime, pointer: int) -> None:
        self.runtime = runtime
        self.pointer = pointer
        self.pid = os.getpid()
        self.messages = Messages(runtime, objc.MESSAGES)
        _give_back(self, self.messages, pointer, ("release",))

    @classmethod
    def default(cls, runtime: Runtime | None = None) -> Device:
        """The system's default device.  ``runtime`` None: this machine's.

        Raises: MetalUnavailable where there is no Metal, no device, or only one behind Rosetta.
        """
        runtime = runtime or objc.native()
        require_own_process(objc.first_process())
        if runtime.translated:
            raise MetalUnavailable(
                "this Python is an Intel program that Rosetta translates: there Metal accepts buffers without a copy, "
                "and fails every command that uses them; use an arm64 Python"
            )
        pointer = objc.default_device(runtime, Messages(runtime, objc.MESSAGES))
        if pointer is None:
            raise MetalUnavailable(
                "Metal found no device: a virtual machine without one, or a session without access to the GPU"
            )
        return cls(runtime, pointer)

    @classmethod
    def retained(cls, runtime: Runtime, pointer: int) -> Device:
        """An ``id<MTLDevice>`` that someone else holds, too."""
        device = cls(runtime, pointer)
        device.messages.send(pointer, "retain")
        return device

    def __repr__(self) -> str:
        return f"<Device {self.name!r}>"

    def _ask(self, selector: str, *arguments: object) -> int:
        require_own_process(self.pid)
        return int(self.messages.send(self.pointer, selector, *arguments))

    @cached_property
    def name(self) -> str:
        """What the device is called, for people."""
        require_own_process(self.pid)
        with self.messages.pool():
            return objc.string_at(self.messages, self.messages.send(self.pointer, "name"))

    @cached_property
    def max_buffer_length(self) -> int:
        """The largest MTLBuffer, in bytes: at least 256 MiB, often half of the memory."""
        return self._ask("maxBufferLength")

    @cached_property
    def recommended_working_set(self) -> int:
        """How many bytes the GPU can use at once without slowing down."""
        return self._ask("recommendedMaxWorkingSetSize")

    @cached_property
    def has_unified_memory(self) -> bool:
        """Whether the GPU reads the CPU's memory directly.  Otherwise every read goes over PCIe."""
        return bool(self._ask("hasUnifiedMemory"))

    @cached_property
    def has_residency_sets(self) -> bool:
        """Whether :class:`Residency` works: from macOS 15 on, with Apple's own GPUs."""
        return bool(self._ask("supportsFamily:", FAMILY_APPLE7)) and self.messages.responds(
            self.pointer, "newResidencySetWithDescriptor:error:"
        )

    def wrap(self, owner: NDArray[np.uint8], address: int, nbytes: int) -> Buffer:
        """An MTLBuffer over memory, without a copy.

        ``owner`` is an array that keeps a mapping open, and in which the range must lie.  It is let go of when the
        buffer is gone, on whatever thread that happens.

        Raises: AlignmentError, MetalBufferError (before Metal is asked, or when it returns nil).
        """
        require_own_process(self.pid)
        begin = owner.ctypes.data
        check_range(
            address,
            nbytes,
            memory=(begin, begin + owner.nbytes),
            page_nbytes=mmap.PAGESIZE,
            max_buffer_length=self.max_buffer_length,
        )
        token, block = objc.keep(self.runtime, owner)
        # A pool, because whatever Metal autoreleases on the way may hold the buffer.
        with self.messages.pool():
            pointer = self.messages.send(
                self.pointer,
                "newBufferWithBytesNoCopy:length:options:deallocator:",
                address,
                nbytes,
                STORAGE_MODE_SHARED,
                block,
            )
        if pointer is None:
            objc.forget(token)
            raise MetalBufferError(
                f"Metal made no buffer of {nbytes} bytes at {address:#x}, of the {self.max_buffer_length} that "
                f"{self.name} allows, and does not say why; free memory, or try a smaller max_buffer_length; "
                f"{IOS_HINT}",
                address=address,
                nbytes=nbytes,
            )
        return Buffer(self.messages, pointer, address, nbytes, token)


class Residency:
    """Keeps buffers resident, so that the first command after a pause does not have to map them again.

    Off unless asked for: kernel panics and leaks were seen with some versions of macOS 15.
    Lifetime: the set holds every buffer until :meth:`end`, or until it is collected.
    Raises: MetalUnavailable without residency sets.
    """

    def __init__(self, device: Device, buffers: Iterable[Buffer]) -> None:
        if not device.has_residency_sets:
            raise MetalUnavailable(
                f"residency sets need macOS 15 and a GPU of Apple's, not {device.name!r}; open without residency=True"
            )
        messages = device.messages
        with messages.pool():
            descriptor = messages.new("MTLResidencySetDescriptor")
            assert descriptor is not None  # it came with macOS 15 too
            pointer = messages.send(
                device.pointer, "newResidencySetWithDescriptor:error:", descriptor, None
            )
            messages.send(descriptor, "release")
        if pointer is None:
            raise MetalUnavailable(
                f"{device.name} made no residency set; open without residency=True"
            )
        self._end = _give_back(
            self, messages, pointer, ("endResidency", "removeAllAllocations", "commit", "release")
        )
        with messages.pool():
            for buffer in buffers:
                messages.send(pointer, "addAllocation:", buffer.pointer)
            messages.send(pointer, "commit")
            messages.send(pointer, "requestResidency")

    def end(self) -> None:
        """Let go of the buffers.  Nothing happens the second time."""
        self._end()
