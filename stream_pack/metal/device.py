"""The GPU: its limits, and MTLBuffers over existing memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import MetalBufferError, MetalUnavailable
from stream_pack.metal import objc
from stream_pack.metal.finalizers import when_collected
from stream_pack.metal.objc import Messages, Runtime
from stream_pack.metal.rules import IOS_HINT, check_range

__all__ = ["Buffer", "Device", "Residency", "require_own_process"]

STORAGE_MODE_SHARED = 0
"""MTLResourceStorageModeShared, with the default cache mode: the CPU reads the memory too, for checksums."""

FAMILY_APPLE7 = 1007
"""MTLGPUFamilyApple7: the M1, the oldest Apple GPU in a Mac."""


class Buffer:
    """An MTLBuffer over memory that another object owns.

    ``pointer`` is the ``id<MTLBuffer>``, for any API that takes one; ``address`` and ``nbytes`` are its memory, and
    ``token`` is its number for :func:`objc.kept`.

    Copies: none; writing to it, from CPU or GPU, is undefined (the memory is a file mapped read-only).
    Lifetime: this object holds one reference, and releases it when it is collected.  The memory stays mapped until
    Metal reports that the last reference is released, including those of command buffers in flight.
    Metal reports it to Python, and waits for Python's lock.  Code that holds the lock while it waits for the GPU, as
    ``torch.mps.synchronize()`` does, must not run while only a command buffer holds the last reference: that is a
    deadlock.  Keep this object, the view or the tensor until after such a call.
    """

    __slots__ = ("__weakref__", "_messages", "_pid", "address", "nbytes", "pointer", "token")

    def __init__(self, device: Device, pointer: int, address: int, nbytes: int, token: int) -> None:
        self.pointer = pointer
        self.address = address
        self.nbytes = nbytes
        self.token = token
        self._messages = device.messages
        self._pid = os.getpid()
        when_collected(self, self._messages.last(pointer, "release"))

    def __repr__(self) -> str:
        return f"<Buffer {self.pointer:#x}, {self.nbytes} bytes at {self.address:#x}>"

    def contents(self) -> int:
        """The address according to Metal; equal to ``address`` as long as nothing was copied."""
        require_own_process(self._pid)
        address: int = self._messages.send(self.pointer, "contents")
        return address


def require_own_process(pid: int) -> None:
    """Raises: MetalUnavailable in a process that was forked from ``pid``, where Metal's objects are invalid."""
    if os.getpid() != pid:
        raise MetalUnavailable(
            f"Metal does not work after a fork, and process {pid}, which forked this one, had used it; start processes "
            "with the 'spawn' method"
        )


class Device:
    """A GPU that Metal supports.

    ``pointer`` is the ``id<MTLDevice>``.  Properties are read on first use.
    Raises (every call of Metal): MetalUnavailable in a forked child.
    """

    def __init__(self, runtime: Runtime, pointer: int) -> None:
        self.runtime = runtime
        self.pointer = pointer
        self.pid = os.getpid()
        self.messages = Messages(runtime, objc.MESSAGES)
        self._answers: dict[str, Any] = {}
        when_collected(self, self.messages.last(pointer, "release"))

    @classmethod
    def default(cls, runtime: Runtime | None = None) -> Device:
        """The system's default device.  ``runtime`` None: this machine's.

        Raises: MetalUnavailable without Metal, without a device, and under Rosetta.
        """
        runtime = runtime or objc.native()
        require_own_process(objc.first_process())
        if runtime.translated:
            raise MetalUnavailable(
                "this Python is an Intel program translated by Rosetta, where Metal accepts buffers without a copy and "
                "then fails every command that uses them; use an arm64 Python"
            )
        pointer = objc.default_device(runtime, Messages(runtime, objc.MESSAGES))
        if pointer is None:
            raise MetalUnavailable(
                "Metal found no device: this is a virtual machine without a GPU, or a session without access to it"
            )
        return cls(runtime, pointer)

    @classmethod
    def retained(cls, runtime: Runtime, pointer: int) -> Device:
        """An ``id<MTLDevice>`` that another owner holds too."""
        device = cls(runtime, pointer)
        device.messages.send(pointer, "retain")
        return device

    def __repr__(self) -> str:
        return f"<Device {self.name!r}>"

    def _known(self, name: str, ask: Callable[[], Any]) -> Any:
        """What ``ask`` returned the first time.  (Up to Python 3.11 a cached_property has a lock, which a forked child
        might wait for, for ever.)"""
        require_own_process(self.pid)
        if name not in self._answers:
            self._answers[name] = ask()
        return self._answers[name]

    def _number(self, selector: str) -> int:
        return int(self._known(selector, lambda: self.messages.send(self.pointer, selector)))

    @property
    def name(self) -> str:
        """The device's name, for messages."""

        def ask() -> str:
            with self.messages.pool():
                return objc.string_at(self.messages, self.messages.send(self.pointer, "name"))

        return str(self._known("name", ask))

    @property
    def max_buffer_length(self) -> int:
        """The largest MTLBuffer, in bytes: at least 256 MiB, often half of the memory."""
        return self._number("maxBufferLength")

    @property
    def recommended_working_set(self) -> int:
        """How many bytes the GPU can use together without slowing down."""
        return self._number("recommendedMaxWorkingSetSize")

    @property
    def has_unified_memory(self) -> bool:
        """Whether the GPU reads the CPU's memory directly, and not over PCIe."""
        return bool(self._number("hasUnifiedMemory"))

    @property
    def has_residency_sets(self) -> bool:
        """Whether :class:`Residency` works: from macOS 15 on, with Apple GPUs."""
        return bool(self._known("has_residency_sets", self._supports_residency_sets))

    def _supports_residency_sets(self) -> bool:
        return bool(self.messages.send(self.pointer, "supportsFamily:", FAMILY_APPLE7)) and self.messages.responds(
            self.pointer, "newResidencySetWithDescriptor:error:"
        )

    def wrap(self, owner: NDArray[np.uint8], address: int, nbytes: int) -> Buffer:
        """An MTLBuffer over memory, without a copy.

        ``owner`` is an array that keeps a mapping open and contains the range.  It is released when the buffer is
        freed, on any thread.

        Raises: AlignmentError, MetalBufferError (before Metal is called, or when it returns nil).
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
        # A pool, because an object that Metal autoreleases here may hold the buffer.
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
                f"Metal returned no buffer for {nbytes} bytes at {address:#x} ({self.name} allows "
                f"{self.max_buffer_length}), without a reason; free memory, or try a smaller max_buffer_length; "
                f"{IOS_HINT}",
                address=address,
                nbytes=nbytes,
            )
        return Buffer(self, pointer, address, nbytes, token)


class Residency:
    """Keeps buffers resident, so that the first command after a pause does not have to map them again.

    Off by default: kernel panics and leaks were seen with some versions of macOS 15.
    Lifetime: the set holds every buffer until :meth:`end`, or until it is collected.
    Raises: MetalUnavailable without residency sets.
    """

    def __init__(self, device: Device, buffers: Iterable[Buffer]) -> None:
        if not device.has_residency_sets:
            raise MetalUnavailable(
                f"residency sets need macOS 15 and an Apple GPU, not {device.name!r}; open without residency=True"
            )
        messages = device.messages
        with messages.pool():
            descriptor = messages.new("MTLResidencySetDescriptor")
            assert descriptor is not None  # in macOS 15 too
            pointer = messages.send(device.pointer, "newResidencySetWithDescriptor:error:", descriptor, None)
            messages.send(descriptor, "release")
        if pointer is None:
            raise MetalUnavailable(f"{device.name} returned no residency set; open without residency=True")
        self._pid = os.getpid()
        self._end = messages.last(pointer, "endResidency", "removeAllAllocations", "commit", "release")
        when_collected(self, self._end)
        with messages.pool():
            for buffer in buffers:
                messages.send(pointer, "addAllocation:", buffer.pointer)
            messages.send(pointer, "commit")
            messages.send(pointer, "requestResidency")

    def end(self) -> None:
        """Release the buffers.  Does nothing the second time, and in a forked child."""
        if os.getpid() == self._pid:
            self._end()
