"""The public entry point for Metal: a few large MTLBuffers over a pack, and a buffer and an offset per tensor."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from stream_pack.errors import AlignmentError, MappingInUse, MetalUnavailable, OptionError, StateError
from stream_pack.format.align import PAGE_NBYTES, align_up
from stream_pack.metal import objc
from stream_pack.metal.device import Buffer, Device, Residency, require_own_process
from stream_pack.metal.placement import place, too_large
from stream_pack.metal.rules import NO_WINDOW, check_limit
from stream_pack.metal.views import MetalView, no_buffer
from stream_pack.reader.pack import Pack, Verify
from stream_pack.reader.pack import open as open_pack
from stream_pack.text import counted, human_nbytes, listed, quoted

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
    """Make the tensors of a pack available to the GPU in place.

    ``source``: a path, for which ``verify``, ``offset`` and ``nbytes`` are those of :func:`stream_pack.open` (with
    ``verify="lazy"`` a tensor's blocks are proved before its first use), or an open pack, which the caller closes.
    A pack inside another file must begin at a multiple of 16384 there.
    ``device``: None for the system's default.  ``max_buffer_length``, in bytes, makes windows smaller than the device
    allows.  ``allow_discrete`` permits a GPU without unified memory, which reads over PCIe, about 25 times slower.
    ``residency`` keeps the buffers resident (see :class:`Residency`).

    Copies: none.
    Warns: RuntimeWarning when tensors are too large for a buffer (only asking for one of them raises TensorTooLarge),
    and when the windows exceed the working set that the device recommends.
    Raises: MetalUnavailable; AlignmentError; MetalBufferError; LimitError for a ``max_buffer_length`` below one page;
    OptionError for an option that has no meaning; what :func:`stream_pack.open` raises.
    """
    device = device or Device.default()
    if not device.has_unified_memory and not allow_discrete:
        raise MetalUnavailable(
            f"{device.name} is a discrete GPU: it would read every weight over PCIe each time; pass "
            "allow_discrete=True to accept that, or copy the weights into its memory"
        )
    limit = check_limit(device.max_buffer_length)
    if max_buffer_length is not None:
        limit = min(limit, check_limit(max_buffer_length))
    if isinstance(source, Pack):
        if (verify, offset, nbytes) != ("never", 0, None):
            raise OptionError(
                "verify, offset and nbytes cannot be given with an open Pack: pass them to stream_pack.open"
            )
        return Weights(source, device, limit, residency=residency, owns_pack=False)
    with ExitStack() as undo:
        pack = undo.enter_context(open_pack(source, offset=offset, nbytes=nbytes, verify=verify))
        weights = Weights(pack, device, limit, residency=residency, owns_pack=True)
        undo.pop_all()  # from here on the weights release the pack
    return weights


class Weights(Mapping[str, MetalView]):
    """A pack whose tensors the GPU reads in place: names to :class:`MetalView`, in file order.

    Made by :func:`open`.

    Lifetime: the memory is unmapped when the deallocator of the last MTLBuffer over it has run, however long command
    buffers, views or other libraries hold one.  Leaving a ``with`` block never raises because of that; :meth:`close`
    does.
    Raises (everything but :meth:`close`): StateError once closed; MetalUnavailable in a forked child.
    """

    def __init__(self, pack: Pack, device: Device, limit: int, *, residency: bool, owns_pack: bool) -> None:
        self.pack = pack
        self.device = device
        self._region_file_offset = pack._head.region_file_offset
        self._placement = place(pack, max_buffer_length=limit)
        self._plan = self._placement.windows
        self._owns_pack = owns_pack
        self._closed = False
        # Windows are kept; buffers of single tensors live only while they are used.
        self._windows: dict[int, Buffer] = {}
        # No WeakValueDictionary: it runs Python code when a buffer is collected.
        self._own: dict[tuple[int, int], weakref.ref[Buffer]] = {}
        # The tokens of every buffer made over a range of memory: another Weights may have made more over it.
        self._made: dict[tuple[int, int], list[int]] = {}
        # For messages: the tensors that used each range of memory.
        self._users: dict[tuple[int, int], set[int]] = {}
        self._lock = threading.RLock()
        self._residency: Residency | None = None
        self._warn()
        # All of them now: a refusal by Metal is known before the first tensor is used.
        buffers = self._all_windows()
        if residency:
            self._residency = Residency(device, buffers)

    def __repr__(self) -> str:
        held = f"{counted(len(self._plan.of), 'tensor')} in {counted(len(self._plan), 'window')}"
        return f"<Weights {self.pack.path!r}, {'closed' if self._closed else held}>"

    def _warn(self) -> None:
        if self.too_large:
            warnings.warn(
                f"{self.pack.path}: too large for one MTLBuffer, which may have {self._placement.limit} bytes here: "
                f"{listed(self.too_large)}; asking for it raises TensorTooLarge",
                RuntimeWarning,
                stacklevel=4,
            )
        total = int((self._plan.ends - self._plan.begins).sum())
        recommended = self.device.recommended_working_set
        if total > recommended:
            warnings.warn(
                f"{self.pack.path}: the windows have {human_nbytes(total)}, more than the working set that "
                f"{self.device.name} recommends ({human_nbytes(recommended)}): expect pages to be read repeatedly",
                RuntimeWarning,
                stacklevel=4,
            )

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"{self.pack.path} is closed: open it again")
        require_own_process(self.device.pid)

    @property
    def too_large(self) -> tuple[str, ...]:
        """The tensors that no MTLBuffer can hold, the largest first; asking for one raises TensorTooLarge."""
        return tuple(map(self.pack._contents.index.name, self._placement.too_large.tolist()))

    @property
    def windows(self) -> tuple[Buffer, ...]:
        """The buffers that together hold all tensors but those of :attr:`too_large`, in file order.

        Nothing in them is verified, even with ``verify="lazy"``.
        Raises: TruncatedError when the file was truncated since it was opened.
        """
        self._require_open()
        self.pack._lender.mapping.check_length()
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
        """Raises: UnknownTensorError, which is a KeyError; TensorTooLarge; TruncatedError when the file was
        truncated since it was opened; ChecksumError when opened with ``verify="lazy"``."""
        self._require_open()
        view = self.pack[name]
        buffer, offset = None, 0
        if view.nbytes:
            tensor = self._fitting(name)
            view.raw()  # verifies the bytes if the pack was opened with verify="lazy"
            window = int(self._plan.of[tensor])
            buffer = self._window(window)
            offset = view.offset - int(self._plan.begins[window])
            self._used(buffer, [tensor])
        return MetalView(view.name, view.dtype, view.shape, view.nbytes, offset, buffer, self.own_buffer)

    def own_buffer(self, name: str) -> Buffer:
        """An MTLBuffer that begins with this tensor, and ends with the page where the tensor ends.

        For APIs without an offset: MPSGraphTensorData, MTLTensor for machine learning.  A process can have some 500,000
        buffers; for thousands of tensors use the windows.
        Copies: none.
        Raises: UnknownTensorError; TensorTooLarge; AlignmentError unless the tensor starts at a page, as those of 1 MiB
        and more do; MetalBufferError for a tensor of 0 bytes; TruncatedError and ChecksumError as for
        ``weights[name]``.
        """
        self._require_open()
        view = self.pack[name]
        if not view.nbytes:
            raise no_buffer(name, view.shape)
        tensor = self._fitting(name)
        if not self._placement.own[tensor]:
            raise AlignmentError(
                f"tensor {quoted(name)} ({view.nbytes} bytes) starts {view.offset % PAGE_NBYTES} bytes after a page "
                "boundary, and a buffer of its own must start at one; bind it with its offset, or pack it with "
                f"alignment=Alignment(small={PAGE_NBYTES})",
                value=view.offset,
                alignment=PAGE_NBYTES,
            )
        view.raw()
        key = (view.offset, align_up(view.nbytes, PAGE_NBYTES))
        with self._lock:
            known = self._own.get(key)
            buffer = None if known is None else known()
            if buffer is None:
                buffer = self._wrap(*key, [tensor])
                self._own[key] = weakref.ref(buffer)
            self._used(buffer, [tensor])
        return buffer

    def _fitting(self, name: str) -> int:
        """The number of a tensor that has bytes.  Raises: TensorTooLarge."""
        index = self.pack._contents.index
        tensor = index.find(name)
        assert tensor is not None
        if self._plan.of[tensor] == NO_WINDOW:
            raise too_large(index, tensor, self._placement.limit)
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
        """Release the buffers and unmap the file.  Does nothing when already closed.

        Raises: MappingInUse, which names the tensors, while any of the MTLBuffers is alive: a view, a command buffer in
        flight, or another library may hold it.  The weights then stay open, without their residency.
        """
        if self._closed:
            return
        require_own_process(self.device.pid)
        self._end_residency()
        with self._lock:
            self._windows.clear()
            # A copy: another thread may get a tensor during the loop.
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
            f"{self.pack.path} cannot be closed while {counted(len(live), 'MTLBuffer')} over it "
            f"{'is' if len(live) == 1 else 'are'} alive (for {listed(names)}); drop views, buffers and arrays of other "
            "libraries, and wait for command buffers; or leave the with block without close(), which unmaps the file "
            "when the last one is released",
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
        if os.getpid() != self.device.pid:
            # A forked child has nothing of Metal's to release, and would wait for ever for a lock that a thread of its
            # parent's held.
            return
        self._end_residency()
        with self._lock:
            self._windows.clear()
        if self._owns_pack:
            self.pack.__exit__(*exc)
