"""Checkpoints as ``torch.save`` wrote them before 1.6 (and still does on request), as a source.

Five pickles (a magic number, the protocol's version, facts about the machine, the value, the keys of its storages),
then every storage in the order of the keys: its number of elements as a signed 64-bit integer, and its bytes.
No padding, no checksum, no mark at the end.  Always little-endian.

Source: torch/serialization.py, ``_legacy_save`` and ``_legacy_load`` of torch 0.2 to 2.13.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from functools import partial

from stream_pack.errors import SourceError, UnsupportedCheckpointError
from stream_pack.pickles.globals import Storage, TorchObjects
from stream_pack.pickles.nesting import flattening
from stream_pack.pickles.state_dict import Flatten, StateDict
from stream_pack.pickles.unpickler import STEP_NBYTES, Unpickler, malformed
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.torch_save.container import Data, End, Event
from stream_pack.sources.torch_save.source import TorchSource
from stream_pack.text import quoted

__all__ = ["LegacyTorchSource"]

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
COUNT_NBYTES = 8


class LegacyTorchSource(TorchSource):
    """The tensors of one legacy checkpoint, from a file or a pipe.

    Takes over ``stream``, positioned at the checkpoint's first byte, and closes it.  ``flatten`` finds the tensors in
    what the pickle describes.

    Raises: UnsupportedCheckpointError, UnsupportedTensorError, SourceError, TruncatedSourceError, LimitError; OSError.
    """

    def __init__(self, stream: ByteStream, *, flatten: Flatten | None = None, watch: MemoryWatch = UNLIMITED) -> None:
        container = _LegacyFile(stream, flatten or flattening(), watch)
        super().__init__(stream, container, kind="torch legacy")

    @property
    def verification(self) -> str:
        return "the source carries no checksums"


class _LegacyFile:
    """The pickles, which are read when it is made, and the storages."""

    big_endian = False
    order_known = True
    checksums = "none"

    def __init__(self, stream: ByteStream, flatten: Flatten, watch: MemoryWatch) -> None:
        self._stream = stream
        self._watch = watch
        self._payloads: dict[str, int] = {}
        objects = TorchObjects()
        if self._unpickle(objects) != MAGIC or self._unpickle(objects) != VERSION:
            raise UnsupportedCheckpointError("the checkpoint has an unexpected magic number or version")
        # Sizes of C types and the byte order of the machine, which torch does not look at either.
        self._unpickle(objects)
        value = self._unpickle(objects)
        found = objects.storages
        self.storages = {key: found[key] for key in _checked_keys(self._unpickle(objects), found)}
        self.state_dict: StateDict = flatten(value, objects.unknown)
        self._data_begin = stream.position

    @property
    def seekable(self) -> bool:
        return self._stream.regular_file is not None

    def payloads(self, storages: Iterable[Storage]) -> dict[Storage, int]:
        if not self.seekable:
            return {}
        payloads = {}
        position = self._data_begin
        for storage in self.storages.values():  # they follow each other, so that no count has to be read
            payloads[storage] = position + COUNT_NBYTES
            position += COUNT_NBYTES + storage.nbytes
        return payloads

    def read(self, chunk_nbytes: int) -> Generator[Event, None, None]:
        for storage in self.storages.values():
            yield from self._read_next(storage, chunk_nbytes)
        self._check_end()

    def locate(self) -> None:
        for storage in self.storages.values():
            self._begin(storage)
            self._stream.skip(storage.nbytes, what=str(storage))
        self._check_end()

    def read_storage(self, storage: Storage, chunk_nbytes: int) -> Iterator[Event]:
        self._stream.seek(self._payloads[storage.key] - COUNT_NBYTES)
        yield from self._read_next(storage, chunk_nbytes)

    def read_range(self, storage: Storage, begin: int, nbytes: int, chunk_nbytes: int) -> Iterator[Event]:
        self._stream.seek(self._payloads[storage.key] + begin)
        what = str(storage)
        for chunk in self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what=what):
            yield Data(chunk, storage, fresh=False)

    def _unpickle(self, objects: TorchObjects) -> object:
        unpickler = Unpickler(
            partial(self._stream.read_some, STEP_NBYTES),
            find_global=objects.find_global,
            find_persistent=objects.find_persistent,
            watch=self._watch,
        )
        value = unpickler.load()
        self._stream.unread(unpickler.rest)
        return value

    def _read_next(self, storage: Storage, chunk_nbytes: int) -> Iterator[Event]:
        payload = self._begin(storage)
        what = str(storage)
        for chunk in self._stream.chunks(storage.nbytes, chunk_nbytes=chunk_nbytes, what=what):
            yield Data(chunk, storage)
        yield End(storage.key, 0, payload, storage)

    def _begin(self, storage: Storage) -> int:
        """Compare the number of elements stored before a storage; return where its bytes begin."""
        count = self._stream.read_exactly(COUNT_NBYTES, what=f"the length of storage {quoted(storage.key)}")
        numel = int.from_bytes(count, "little", signed=True)
        if numel != storage.numel:
            raise SourceError(
                f"storage {quoted(storage.key)} has {numel} elements in the file, and {storage.numel} for the "
                "tensors that use it: the checkpoint is damaged"
            )
        payload = self._payloads[storage.key] = self._stream.position
        return payload

    def _check_end(self) -> None:
        if not self._stream.at_end():
            raise SourceError(
                f"bytes follow the checkpoint's last storage, at byte {self._stream.position}: trailing data, or a "
                "second checkpoint"
            )


def _checked_keys(keys: object, storages: dict[str, Storage]) -> list[str]:
    """The keys of all storages in the order in which they are stored."""
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise malformed("the keys of its storages are not a list of strings")
    if len(keys) != len(storages) or storages.keys() != set(keys):
        raise malformed(f"it lists {len(keys)} storages, but its tensors use {len(storages)} different ones")
    return keys
