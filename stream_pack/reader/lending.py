"""The memory of an open pack: given to callers, and tracked while they use it."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import FormatError, MappingInUse
from stream_pack.format.head import Head
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.reader.blocks import BlockCheck
from stream_pack.reader.locks import Locked
from stream_pack.reader.mapping import Mapping as FileMapping
from stream_pack.reader.opening import naming
from stream_pack.reader.tensors import Storages
from stream_pack.text import listed, quoted

if TYPE_CHECKING:
    import torch

__all__ = ["Contents", "Lender"]


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What an open file holds: an index, and the region that it describes.

    ``head`` and ``checksum`` (the footer's) are None for a raw payload, which has no index of its own.  ``faults`` says
    why a tensor's bytes are not what its dtype and shape promise; ``dim_orders``, by tensor, in which order its dims
    follow in memory, where that is not row-major; no pack has any of either.

    Units: bytes; ``region_file_offset`` counts from the pack's first byte.
    """

    head: Head | None
    checksum: int | None
    index: Index
    region_file_offset: int
    region_nbytes: int
    nbytes: int
    faults: Mapping[int, str]
    dim_orders: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """All that closing drops.  Every call reads it once, because another thread may close the pack."""

    mapping: FileMapping
    contents: Contents
    check: BlockCheck | None


class Lender(Locked):
    """The memory of one open pack.

    ``reopened``: how to make another one of the same file in another process, as ``__reduce__`` says it.

    Lifetime: arrays and storages keep the memory mapped.  :meth:`release` only drops this object's own reference;
    :meth:`close` unmaps, or refuses.
    Raises (every method that returns memory): StateError once closed, also by another thread; TruncatedError when the
    file has become shorter.
    """

    def __init__(
        self, mapping: FileMapping, contents: Contents, check: BlockCheck | None, reopened: tuple[object, ...]
    ) -> None:
        super().__init__()
        self._reopened = reopened
        self._file = mapping.file
        self._state: _Open | None = _Open(mapping, contents, check)
        self._storages = Storages()
        # Arrays in use, by number, and the tensors they are for: one number, or a set of several.  As few objects as
        # possible: there may be a hundred thousand entries.
        self._lent: dict[int, weakref.KeyedRef[int, NDArray[np.uint8]]] = {}
        self._users: dict[int, int | set[int]] = {}
        self._counter = itertools.count()
        # Those that are gone, noted without any Python code: in a finalizer a Ctrl-C would be lost, and the note too.
        self._gone: deque[weakref.KeyedRef[int, NDArray[np.uint8]]] = deque()
        # The array below each torch storage, and the tensors it is for, by buffer.  The storage may outlive the array:
        # torch.multiprocessing moves what it sends into other memory.
        self._storage_arrays: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._storage_users: dict[int, int | set[int]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        # One for all views in a pickle, which therefore share the memory where they arrive.
        return self._reopened

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._file.path

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :meth:`release` was called."""
        return self._state is None

    @property
    def mapping(self) -> FileMapping:
        """The memory.  Raises: StateError once closed."""
        return self._open().mapping

    @property
    def contents(self) -> Contents:
        """Index and region.  Raises: StateError once closed."""
        return self._open().contents

    def _open(self) -> _Open:
        state = self._state
        if state is None:
            raise self._file.closed_error()
        return state

    def array(self, tensor: int, start: int, nbytes: int, *, writable: bool) -> NDArray[np.uint8]:
        """Bytes ``[start, start + nbytes)`` of a tensor, in place; read-only, or copy-on-write.

        Raises: StateError, ChecksumError.
        """
        state = self._open()
        if nbytes == 0:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = writable
            return empty
        state.mapping.check_length()
        _prove(state, tensor, start, nbytes)
        file_offset = state.contents.region_file_offset + state.contents.index.offset(tensor) + start
        mapping = state.mapping
        array = (mapping.writable_array if writable else mapping.array)(file_offset, nbytes)
        self._track(array, tensor)
        return array

    def range(self, file_offset: int, nbytes: int, tensors: Iterable[int]) -> NDArray[np.uint8]:
        """Any bytes of the pack, in place and read-only; no checksum is checked.

        ``tensors``: those that :meth:`close` names for them.  Raises: StateError, TruncatedError.
        """
        mapping = self.mapping
        mapping.check_length()
        array = mapping.array(file_offset, nbytes)
        self._track(array, set(tensors))
        return array

    def storage(self, tensor: int, start: int, nbytes: int) -> tuple[torch.UntypedStorage, int]:
        """The storage of a tensor's buffer, copy-on-write, and the offset in it of byte ``start`` of the tensor.

        Only ``nbytes`` bytes from there are proved, at least one.  Raises: StateError, ChecksumError.
        """
        state = self._open()
        state.mapping.check_length()
        _prove(state, tensor, start, nbytes)
        index = state.contents.index
        buffer = int(index.tensor_buffers[tensor])
        file_offset = state.contents.region_file_offset + int(index.buffer_offsets[buffer])

        def make() -> NDArray[np.uint8]:
            array = state.mapping.writable_array(file_offset, int(index.buffer_nbytes[buffer]))
            self._storage_arrays[buffer] = weakref.ref(array)
            self._storage_users[buffer] = tensor
            return array

        with self._lock:
            storage = self._storages.of(buffer, make)
            users = self._storage_users[buffer]
            if isinstance(users, set):
                users.add(tensor)
            elif users != tensor:
                self._storage_users[buffer] = {users, tensor}
        return storage, int(index.tensor_starts[tensor]) + start

    def fault(self, tensor: int, name: str) -> None:
        """Raises: FormatError when the tensor's bytes are not what its dtype and shape promise."""
        fault = self.contents.faults.get(tensor)
        if fault is not None:
            raise FormatError(f"{self.path}: tensor {quoted(name)} {fault}; .raw() returns its bytes unchanged")

    def _track(self, array: NDArray[np.uint8], users: int | set[int]) -> None:
        self._settle()
        key = next(self._counter)
        self._users[key] = users
        self._lent[key] = weakref.KeyedRef(array, self._gone.append, key)

    def _settle(self) -> None:
        """Forget the arrays that are gone."""
        while self._gone:
            try:
                key = self._gone.popleft().key
            except IndexError:  # another thread was faster
                return
            self._users.pop(key, None)
            self._lent.pop(key, None)

    def close(self) -> None:
        """Unmap now.  Nothing happens when already closed.

        Raises: MappingInUse, and closes nothing, while an array or storage is alive.
        """
        state = self._state
        if state is None:
            return
        held = self._held()
        if held:
            tensors = set().union(*(users if isinstance(users, set) else {users} for users in held))
            names = tuple(state.contents.index.name(tensor) for tensor in sorted(tensors))
            raise MappingInUse(
                f"{self.path} cannot be closed while arrays or tensors of it are alive: {listed(names)}; drop them "
                "first, or leave the with block without close(), which unmaps the file when the last one is released",
                tensors=names,
            )
        state.mapping.close()
        self._state = None

    def release(self) -> None:
        """Close for new use; the memory is unmapped when the last array or storage is released."""
        state, self._state = self._state, None
        if state is not None:
            state.mapping.release()

    def _held(self) -> list[int | set[int]]:
        """The tensors whose memory is in use, once per array or storage."""
        self._settle()
        with self._lock:
            arrays = self._storage_arrays.items()
            stored = [self._storage_users[key] for key, array in arrays if array() is not None]
            live = [key for key, array in list(self._lent.items()) if array() is not None]
            return [*map(self._users.__getitem__, live), *stored]


def _prove(state: _Open, tensor: int, start: int, nbytes: int) -> None:
    index = state.contents.index
    buffer = int(index.tensor_buffers[tensor])
    if state.check is not None and buffer != NO_BUFFER:
        begin = int(index.tensor_starts[tensor]) + start
        with naming(state.mapping.file):
            state.check.check(buffer, begin, begin + nbytes)
