"""A pack on the GPU: a few large MTLBuffers over its mapping, and for each tensor a buffer and an offset."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import numpy as np

from stream_pack.errors import (
    AlignmentError,
    MappingInUse,
    MetalUnavailable,
    OptionError,
    StateError,
)
from stream_pack.format.align import PAGE_NBYTES, align_up
from stream_pack.metal import objc
from stream_pack.metal.device import Buffer, Device, Residency, require_own_process
from stream_pack.metal.rules import (
    NO_WINDOW,
    Windows,
    check_limit,
    plan_windows,
    too_large,
)
from stream_pack.metal.views import MetalView, no_buffer
from stream_pack.reader.pack import Pack, Verify
from stream_pack.reader.pack import open as open_pack
from stream_pack.text import human_nbytes, listed, quoted

__all__ = ["Weights", "open"]


def open(
    source: str | os.PathLike[str] | Pack,
    *,
    device: Device | None = None,
    max_buffer_length: int | None = None,
    allow_discrete: bool = False,
    residency: bool = False,
    verify: Verify = "never",
    offset: int = 0,
    nbytes: int | None = None,
) -> Weights:
    """Make the tensors of a pack available to the GPU where they lie.

    ``source``: a path, for which ``verify``, ``offset`` and ``nbytes`` are those of :func:`stream_pack.open` (with
    ``verify="lazy"`` a tensor's blocks are proved before it is first handed out), or an open pack, which stays the
    caller's.  A pack inside another file must begin at a page there.
    ``device``: None is the system's default.  ``max_buffer_length``, in bytes, makes windows smaller than the device
    allows.  ``allow_discrete`` permits a GPU without unified memory, which reads over PCIe, about 25 times slower.
    ``residency`` keeps the buffers resident (see :class:`Residency`).

    Copies: none.
    Warns: RuntimeWarning when the windows exceed what the device recommends to use at once.
    Raises: MetalUnavailable, TensorTooLarge (naming all that are), AlignmentError, MetalBufferError, LimitError for a
    ``max_buffer_length`` below one page, OptionError for an option that has no meaning; what :func:`stream_pack.open`
    raises.
    """
    device = device or Device.default()
    if not device.has_unified_memory and not allow_discrete:
        raise MetalUnavailable(
            f"{device.name} has memory of its own: it would read every weight over PCIe each time; pass "
            "allow_discrete=True if that will do, or copy the weights into its memory"
        )
    limit = check_limit(device.max_buffer_length)
    if max_buffer_length is not None:
        limit = min(limit, check_limit(max_buffer_length))
    if isinstance(source, Pack):
        if (verify, offset, nbytes) != ("never", 0, None):
            raise OptionError(
                "verify, offset and nbytes go to stream_pack.open, which has been called"
            )
        return Weights(source, device, limit, residency=residency, owns_pack=False)
    with ExitStack() as undo:
        pack = undo.enter_context(open_pack(source, offset=offset, nbytes=nbytes, verify=verify))
        weights = Weights(pack, device, limit, residency=residency, owns_pack=True)
        undo.pop_all()  # from here on the pack is the weights' to release
    return weights


class Weights(Mapping[str, MetalView]):
    """A pack whose tensors the GPU reads in place: names to :class:`MetalView`, in the pack's order.

    Made by :func:`open`.

    Lifetime: the memory goes when the deallocator of the last MTLBuffer over it has run, however long command buffers,
    views or other libraries hold one.  Leaving a ``with`` block never raises for that; :meth:`close` does.
    Raises (everything but :meth:`close`): StateError once closed; MetalUnavailable in a forked child.
    """

    def __init__(
        self, pack: Pack, device: Device, limit: int, *, residency: bool, owns_pack: bool
    ) -> None:
        if pack.offset % mmap.PAGESIZE:
            raise AlignmentError(
                f"{pack.path}: the pack begins at byte {pack.offset}, and only at a multiple of {mmap.PAGESIZE} could "
                "it be used in place; align the segment that holds it, or copy the pack into a file of its own",
                value=pack.offset,
                alignment=mmap.PAGESIZE,
            )
        self.pack = pack
        self.device = device
        self._region_file_offset = pack._head.region_file_offset
        self._plan = _plan(pack, limit)
        self._owns_pack = owns_pack
        self._closed = False
        # Buffers held for the next who asks; those of single tensors live only while somebody has them.
        self._windows: dict[int, Buffer] = {}
        self._own: weakref.WeakValueDictionary[tuple[int, int], Buffer] = (
            weakref.WeakValueDictionary()
        )
        # Every buffer made over a range of memory, by its token: another who has opened the pack may have more.
        self._made: dict[tuple[int, int], list[int]] = {}
        # For messages: the tensors handed out with each range of memory.
        self._users: dict[tuple[int, int], set[int]] = {}
        self._lock = threading.RLock()
        self._residency: Residency | None = None
        self._warn_of_working_set()
        # All of them now: what Metal refuses is known before the first tensor is asked for.
        buffers = self._all_windows()
        if residency:
            self._residency = Residency(device, buffers)

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else f"{len(self._plan.of)} tensors in {len(self._plan)} windows"
        )
        return f"<Weights {self.pack.path!r}, {state}>"

    def _warn_of_working_set(self) -> None:
        total = int((self._plan.ends - self._plan.begins).sum())
        recommended = self.device.recommended_working_set
        if total > recommended:
            warnings.warn(
                f"{self.pack.path}: the windows have {human_nbytes(total)}, {self.device.name} recommends to use "
                f"no more than {human_nbytes(recommended)} at once; expect pages to be read again and again",
                RuntimeWarning,
                stacklevel=4,
            )

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"{self.pack.path} is closed: open it again")
        require_own_process(self.device.pid)

    @property
    def windows(self) -> tuple[Buffer, ...]:
        """The buffers that together hold all tensors, in the order of the file.

        Nothing in them is proved, whatever the pack was opened with.
        """
        self._require_open()
        buffers = self._all_windows()
        for window, buffer in enumerate(buffers):
            self._used(buffer, self._plan.tensors(window).tolist())
        return buffers

    def _all_windows(self) -> tuple[Buffer, ...]:
        return tuple(self._window(window) for window in range(len(self._plan)))

    def _window(self, window: int) -> Buffer:
        with self._lock:
            if window not in self._windows:
                begin, end = int(self._plan.begins[window]), int(self._plan.ends[window])
                tensors = self._plan.tensors(window).tolist()
                self._windows[window] = self._wrap(begin, end - begin, tensors)
            return self._windows[window]

    def _wrap(self, offset: int, nbytes: int, tensors: list[int]) -> Buffer:
        file_offset = self._region_file_offset + offset
        memory = self.pack.memory(file_offset, nbytes, tensors=tensors)
        buffer = self.device.wrap(memory, memory.ctypes.data, nbytes)
        made = self._made.setdefault((buffer.address, buffer.nbytes), [])
        made[:] = [*filter(objc.kept, made), buffer.token]
        return buffer

    def __getitem__(self, name: str) -> MetalView:
        """Raises: UnknownTensorError, which is a KeyError; ChecksumError when opened with ``verify="lazy"``."""
        self._require_open()
        view = self.pack[name]
        buffer, offset = None, 0
        if view.nbytes:
            view.raw()  # proves the bytes, when the pack was opened so
            tensor = self._number(name)
            window = int(self._plan.of[tensor])
            buffer = self._window(window)
            offset = view.offset - int(self._plan.begins[window])
            self._used(buffer, [tensor])
        return MetalView(
            view.name, view.dtype, view.shape, view.nbytes, offset, buffer, self.own_buffer
        )

    def own_buffer(self, name: str) -> Buffer:
        """An MTLBuffer that begins with this tensor, and ends with the page where the tensor ends.

        For what takes no offset: MPSGraphTensorData, MTLTensor for machine learning.  A process can have some 500,000
        buffers; for thousands of tensors use the windows.
        Copies: none.
        Raises: UnknownTensorError; AlignmentError unless the tensor starts at a page, as those of 1 MiB and more do;
        MetalBufferError for a tensor of 0 bytes; ChecksumError as for ``weights[name]``.
        """
        self._require_open()
        view = self.pack[name]
        if not view.nbytes:
            raise no_buffer(name, view.shape)
        if view.offset % PAGE_NBYTES:
            raise AlignmentError(
                f"tensor {quoted(name)} ({view.nbytes} bytes) starts {view.offset % PAGE_NBYTES} bytes after a page "
                "boundary, and a buffer of its own must start at one; bind it with its offset, or pack it with "
                f"alignment=Alignment(small={PAGE_NBYTES})",
                value=view.offset,
                alignment=PAGE_NBYTES,
            )
        view.raw()
        tensor = self._number(name)
        key = (view.offset, align_up(view.nbytes, PAGE_NBYTES))
        with self._lock:
            buffer = self._own.get(key)
            if buffer is None:
                buffer = self._own[key] = self._wrap(*key, [tensor])
            self._used(buffer, [tensor])
        return buffer

    def _number(self, name: str) -> int:
        tensor = self.pack._contents.index.find(name)
        assert tensor is not None
        return tensor

    def _used(self, buffer: Buffer, tensors: list[int]) -> None:
        self._users.setdefault((buffer.address, buffer.nbytes), set()).update(tensors)

    def __contains__(self, name: object) -> bool:
        self._require_open()
        return name in self.pack

    def __len__(self) -> int:
        self._require_open()
        return len(self._plan.of)

    def __iter__(self) -> Iterator[str]:
        self._require_open()
        return iter(self.pack)

    def close(self) -> None:
        """Let the buffers go and unmap the file.  Nothing happens when already closed.

        Raises: MappingInUse, which names the tensors, while any MTLBuffer lives that was handed out here: a view, a
        command buffer in flight, or another library may hold it.  The weights stay open then, without their residency.
        """
        if self._closed:
            return
        require_own_process(self.device.pid)
        self._end_residency()
        with self._lock:
            self._windows.clear()
            # A copy: another thread may be handed out a tensor meanwhile.
            live = [key for key in list(self._users) if any(map(objc.kept, self._made[key]))]
            if live:
                raise self._in_use(live)
            if self._owns_pack:
                self.pack.close()
            self._closed = True

    def _in_use(self, live: list[tuple[int, int]]) -> MappingInUse:
        index = self.pack._contents.index
        tensors = sorted(set().union(*(self._users[key] for key in live)))
        names = tuple(index.name(tensor) for tensor in tensors)
        return MappingInUse(
            f"{self.pack.path} cannot be closed while MTLBuffers over it live ({len(live)}, handed out for "
            f"{listed(names)}); drop views, buffers and arrays of other libraries, wait for "
            "command buffers; or leave the with block without close(): then the memory goes with the last of them",
            tensors=names,
        )

    def _end_residency(self) -> None:
        residency, self._residency = self._residency, None
        if residency is not None:
            residency.end()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._end_residency()
        with self._lock:
            self._windows.clear()
        if self._owns_pack:
            self.pack.__exit__(*exc)


def _plan(pack: Pack, limit: int) -> Windows:
    index = pack._contents.index
    plan = plan_windows(index.offsets, index.tensor_nbytes, max_buffer_length=limit)
    outside = np.flatnonzero((plan.of == NO_WINDOW) & (index.tensor_nbytes > 0))
    if len(outside):
        largest_first = outside[np.argsort(-index.tensor_nbytes[outside], kind="stable")].tolist()
        raise too_large(
            tuple(index.name(tensor) for tensor in largest_first),
            nbytes=int(index.tensor_nbytes[largest_first[0]]),
            max_buffer_length=limit,
        )
    return plan
