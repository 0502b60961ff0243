"""The records of a torch.save archive: the pickle first, then every storage, each whole and with the CRC-32 of torch.

Record order: ``data.pkl``, a few small records, the storages, a few small records, the directory.  One pass is enough.
The directory comes last and is compared with all that has passed; nothing is believed because it says so.  Only
where ``data.pkl`` is not the first record (another program has packed the archive again) the directory is used to find
it, which takes a file.  Such programs also compress: deflated records are read in the order of the archive only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from zlib import crc32

from stream_pack.errors import SourceChecksumError, SourceError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pickles.globals import Storage, TorchObjects
from stream_pack.pickles.state_dict import Flatten, StateDict
from stream_pack.pickles.unpickler import STEP_NBYTES, Unpickler
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.sources.torch_save.container import Data, End, Event
from stream_pack.sources.torch_save.inflate import Inflated
from stream_pack.sources.torch_save.zip_records import (
    DEFLATED,
    STORED,
    DirectoryEntry,
    LocalHeader,
    find_directory,
    read_descriptor,
    read_directory,
    read_local_header,
    scan_payload,
)
from stream_pack.text import listed, quoted

__all__ = ["TorchArchive", "is_pickle"]

PICKLE = "data.pkl"
STORAGES = "data/"
BYTEORDER = "byteorder"
FORMAT_VERSION = ".format_version"
SMALL = {BYTEORDER, "version", FORMAT_VERSION, ".storage_alignment", ".data/serialization_id"}
"""What torch writes beside the pickle and the storages: a few bytes each."""
SMALL_NBYTES = 65536
HEADER_NBYTES = 512
"""What is read at once where only the header of a record is wanted: most have less than 100 bytes."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A record that has passed.  Units: bytes from the archive's start, of its header and of its payload."""

    position: int
    payload: int
    nbytes: int
    packed_nbytes: int
    crc: int
    method: int


class TorchArchive:
    """One archive, read from ``stream``, positioned at its first byte; ``flatten`` finds the tensors in its pickle.

    When made, everything before the first storage has been read: ``state_dict``, ``big_endian`` and ``storages`` are
    known.  Where storages are only read as they come, they are in the order in which their records are expected;
    else in that of first use.

    Raises: UnsupportedCheckpointError, SourceError, TruncatedSourceError; OSError.
    """

    def __init__(self, stream: ByteStream, *, flatten: Flatten, watch: MemoryWatch) -> None:
        self._stream = stream
        self._watch = watch
        self._flatten = flatten
        self._records: dict[str, _Record] = {}
        self._pickle_nbytes = 0
        self._packed_nbytes = 0  # of the record that has just been read
        self._deflated = False
        self._byteorder = b"little"  # what no byteorder record means
        self._storages_seen = 0
        self.storages: dict[str, Storage] = {}
        self.unreferenced = 0
        self.verified = 0
        self.unverified = 0
        first = read_local_header(stream)
        if first is not None and is_pickle(first.name):
            self._prefix = first.name.removesuffix(PICKLE)
            self.state_dict, self.storages = self._read_pickle(first)
            self._next = self._read_small()
        else:
            directory = self._read_directory_first(first)
            name = next(filter(is_pickle, directory))
            self._prefix = name.removesuffix(PICKLE)
            self.state_dict, self.storages = self._read_pickle(_header_at(stream, directory[name]))
            byteorder = directory.get(self._prefix + BYTEORDER)
            if byteorder is not None:
                self._drain(self._read_record(_header_at(stream, byteorder), SMALL_NBYTES))
            self._deflated |= any(entry.method == DEFLATED for entry in directory.values())
            self._records.clear()
            stream.seek(0)
            self._next = read_local_header(stream)
        self._deflated |= self._next is not None and self._next.deflated
        self.order_known = True
        if stream.regular_file is None:
            self._expect_order_of_torch()
        else:
            self._deflated = self._deflated or self._lists_deflated()
            if self._deflated:
                self.storages = self._in_order_of_records()

    @property
    def big_endian(self) -> bool:
        """Whether multi-byte elements have their most significant byte first."""
        return self._byteorder == b"big"

    @property
    def seekable(self) -> bool:
        """Whether every storage is uncompressed in a regular file."""
        return self._stream.regular_file is not None and not self._deflated

    @property
    def checksums(self) -> str:
        """Those of the records, which the pickle's is taken to stand for."""
        return "CRC-32 of each record" if self.verified else "none"

    def payloads(self, storages: Iterable[Storage]) -> dict[Storage, int]:
        """Where these storages begin in a file, for those that are stored there as they are, and which the directory
        and the header of the record agree about."""
        nbytes = self._stream.file_nbytes
        if nbytes is None:
            return {}
        headers = self._stream.part(0, nbytes)
        headers.read_ahead_nbytes = HEADER_NBYTES
        entries = {entry.name: entry for entry in self._listed()}
        payloads = {}
        for storage in storages:
            entry = entries.get(self._name_of(storage))
            if entry is not None and entry.method == STORED and entry.nbytes == storage.nbytes:
                _header_at(headers, entry)
                payloads[storage] = headers.position
        return payloads

    def read(self, chunk_nbytes: int) -> Generator[Event, None, None]:
        """All records in the order of the archive, then its directory and its end.  Nothing is left unchecked
        when it ends, but the CRC-32s: those are for :meth:`verify`, which may run in another thread."""
        while self._next is not None:
            yield from self._read_record(self._next, chunk_nbytes)
            self._next = read_local_header(self._stream)
        self._check_end()

    def locate(self) -> None:
        """The same without reading storages, from a file: :meth:`read_storage` and :meth:`read_range` may follow."""
        while self._next is not None:
            storage = self._begin(self._next)
            if storage is None:
                self._drain(self._read_record(self._next, SMALL_NBYTES))
            else:
                if self._next.deflated:
                    raise SourceError(
                        f"record {quoted(self._next.name)} is compressed, but the archive's directory says it is not"
                    )
                payload = self._stream.position
                self._stream.skip(storage.nbytes, what=str(storage))
                self._finish(self._next, payload, storage.nbytes, storage.nbytes)
            self._next = read_local_header(self._stream)
        self._check_end()

    def read_storage(self, storage: Storage, chunk_nbytes: int) -> Iterator[Event]:
        """One storage from its first byte to its end, after :meth:`locate`."""
        record = self._records[self._name_of(storage)]
        self._stream.seek(record.payload)
        for chunk in self._stored_chunks(storage, chunk_nbytes):
            yield Data(chunk, storage)
        yield End(self._name_of(storage), record.crc, record.payload, storage)

    def read_range(self, storage: Storage, begin: int, nbytes: int, chunk_nbytes: int) -> Iterator[Event]:
        """A part of a storage that has been read before, after :meth:`locate`."""
        self._stream.seek(self._records[self._name_of(storage)].payload + begin)
        what = str(storage)
        for chunk in self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what=what):
            yield Data(chunk, storage, fresh=False)

    def verify(self, name: str, stated: int, actual: int) -> None:
        """Compare the CRC-32 that the archive states for a record with that of its bytes.

        Raises: SourceChecksumError, naming the tensors.
        """
        if stated == actual:
            self.verified += actual != 0  # that of no bytes is 0, and proves nothing
        elif stated == 0:  # torch.serialization.set_crc32_options(False)
            self.unverified += 1
        else:
            storage = self.storages.get(name.removeprefix(self._prefix + STORAGES))
            users = "" if storage is None else f" ({self._users(storage)})"
            raise SourceChecksumError(
                f"record {quoted(name)}{users} is damaged in the source: its CRC-32 is 0x{actual:08x}, "
                f"the archive states 0x{stated:08x}",
                record=name,
                expected=stated,
                actual=actual,
            )

    # -- the head

    def _read_pickle(self, header: LocalHeader) -> tuple[StateDict, dict[str, Storage]]:
        stream, objects = self._stream, TorchObjects()
        payload = stream.position
        crc, last = 0, b""

        inflated = self._inflated(header) if header.deflated else None

        def read_some() -> bytes:
            nonlocal crc, last
            crc = crc32(last, crc)
            read = stream.read_some if inflated is None else inflated.read
            last = read(STEP_NBYTES)
            return last

        unpickler = Unpickler(
            read_some, find_global=objects.find_global, find_persistent=objects.find_persistent, watch=self._watch
        )
        value = unpickler.load()
        rest = unpickler.rest
        crc = crc32(last[: len(last) - len(rest)], crc)
        packed_nbytes = self._pickle_nbytes = unpickler.nbytes
        del unpickler  # and its memo, which refers to everything
        if inflated is None:
            stream.unread(rest)
        else:
            if rest or inflated.read(1):
                raise SourceError(f"bytes follow the pickle in record {quoted(header.name)}")
            packed_nbytes = inflated.packed_nbytes
            self._deflated = True
        stated = self._finish(header, payload, self._pickle_nbytes, packed_nbytes)
        self.verify(header.name, stated, crc)
        return self._flatten(value, objects.unknown), objects.storages

    def _read_small(self) -> LocalHeader | None:
        """Read the small records after the pickle, and return the header of the first other one."""
        while (header := read_local_header(self._stream)) is not None:
            if header.name.removeprefix(self._prefix) not in SMALL:
                break
            self._drain(self._read_record(header, SMALL_NBYTES))
        return header

    def _read_directory_first(self, first: LocalHeader | None) -> dict[str, DirectoryEntry]:
        """The directory of a file whose first record is not the pickle."""
        if first is None:
            raise UnsupportedCheckpointError("the archive is empty: no checkpoint")
        if self._stream.regular_file is None:
            raise UnsupportedCheckpointError(
                f"the archive's first record is {quoted(first.name)}, not data.pkl ({_looks_like([first.name])}), "
                "so its contents are known only at the end: converting it needs temporary disk space for the whole "
                "archive; save it to a file to inspect it first"
            )
        self._stream.seek(find_directory(self._stream))
        directory = {entry.name: entry for entry in read_directory(self._stream)}
        others = any(name.endswith("/constants.pkl") for name in directory)
        if others or sum(map(is_pickle, directory)) != 1:
            raise UnsupportedCheckpointError(
                f"the archive is not a checkpoint of torch.save: {_looks_like(list(directory))}"
            )
        return directory

    def _listed(self) -> Iterator[DirectoryEntry]:
        """What the directory of a file says, as far as it can be read: whether it is true, :meth:`read` tells."""
        position = self._stream.position
        with suppress(SourceError):
            self._stream.seek(find_directory(self._stream))
            yield from read_directory(self._stream)
        self._stream.seek(position)

    def _lists_deflated(self) -> bool:
        """Whether a record after the first storage is compressed: some programs store what does not become shorter."""
        return DEFLATED in {entry.method for entry in self._listed()}

    def _in_order_of_records(self) -> dict[str, Storage]:
        """The storages as :meth:`read` will bring them, so that what has to wait for its turn can be predicted."""
        position = self._stream.position
        places = {entry.name: entry.position for entry in self._listed()}
        storages = self.storages.items()
        return dict(sorted(storages, key=lambda item: places.get(self._name_of(item[1]), position)))

    def _expect_order_of_torch(self) -> None:
        """Put the storages into the order that the version of torch writes which the records so far tell of.

        Another program may have packed them in another order; its first storage shows that.
        """
        # torch.serialization._save: before this record existed, storages were sorted by their keys as text.
        if self._prefix + FORMAT_VERSION not in self._records:
            self.storages = dict(sorted(self.storages.items()))
        first = self._next.name if self._next is not None else ""
        names = map(self._name_of, self.storages.values())
        self.order_known = first == next(names, first) or first not in names

    # -- records

    def _read_record(self, header: LocalHeader, chunk_nbytes: int) -> Generator[Event, None, None]:
        payload = self._stream.position
        storage = self._begin(header)
        if storage is None:
            chunks = self._other_payload(header, chunk_nbytes)
        elif header.deflated:
            chunks = self._inflated_chunks(header, storage.nbytes, chunk_nbytes)
        else:
            chunks = self._stored_chunks(storage, chunk_nbytes)
        nbytes = 0
        for chunk in chunks:
            nbytes += len(chunk)
            yield Data(chunk, storage)
        packed_nbytes = self._packed_nbytes if header.deflated else nbytes
        crc = self._finish(header, payload, nbytes, packed_nbytes)
        yield End(header.name, crc, payload, storage)

    def _begin(self, header: LocalHeader) -> Storage | None:
        """The storage that the record holds, if it is one."""
        if header.name in self._records:
            raise SourceError(
                f"the archive holds two records named {quoted(header.name)}: it is unclear which one is meant"
            )
        prefix = self._prefix + STORAGES
        if not header.name.startswith(prefix):
            return None
        storage = self.storages.get(header.name.removeprefix(prefix))
        self._storages_seen += storage is not None
        return storage

    def _finish(self, header: LocalHeader, payload: int, nbytes: int, packed_nbytes: int) -> int:
        crc = read_descriptor(self._stream, header, nbytes, packed_nbytes)
        self._records[header.name] = _Record(
            header.position, payload, nbytes, packed_nbytes, crc, DEFLATED if header.deflated else STORED
        )
        return crc

    def _stored_chunks(self, storage: Storage, chunk_nbytes: int) -> Iterator[memoryview]:
        what = str(storage)
        return self._stream.chunks(storage.nbytes, chunk_nbytes=chunk_nbytes, what=what)

    def _inflated(self, header: LocalHeader) -> Inflated:
        return Inflated(self._stream, what=f"record {quoted(header.name)}")

    def _inflated_chunks(self, header: LocalHeader, nbytes: int | None, chunk_nbytes: int) -> Iterator[bytes]:
        inflated = self._inflated(header)
        yield from inflated.chunks(nbytes, chunk_nbytes=chunk_nbytes)
        self._packed_nbytes = inflated.packed_nbytes

    def _other_payload(self, header: LocalHeader, chunk_nbytes: int) -> Iterator[memoryview | bytes]:
        kind = header.name.removeprefix(self._prefix)
        if header.deflated:
            plain = None if header.streamed else header.nbytes
            payload: Iterator[memoryview | bytes] = self._inflated_chunks(header, plain, chunk_nbytes)
        elif kind == PICKLE:  # passed again, after it was read by the directory
            payload = self._chunks(header, self._pickle_nbytes, chunk_nbytes)
        elif header.streamed:
            payload = scan_payload(self._stream, header)
        else:
            payload = self._chunks(header, header.nbytes, chunk_nbytes)
        if kind not in SMALL:
            self.unreferenced += kind != PICKLE
            return payload
        data = _small(header, payload)
        if kind == BYTEORDER:
            self._see_byteorder(data)
        return iter([data])

    def _chunks(self, header: LocalHeader, nbytes: int, chunk_nbytes: int) -> Iterator[memoryview]:
        what = f"record {quoted(header.name)}"
        return self._stream.chunks(nbytes, chunk_nbytes=chunk_nbytes, what=what)

    def _see_byteorder(self, data: bytes) -> None:
        if data not in (b"little", b"big"):
            raise UnsupportedCheckpointError(f"the checkpoint's byte order is {quoted(data)}: expected little or big")
        if self._storages_seen and data != self._byteorder:
            raise UnsupportedCheckpointError(
                f"the checkpoint's byte order, {quoted(data)}, is stated after its tensors: save it again with torch"
            )
        self._byteorder = data

    def _drain(self, events: Iterable[Event]) -> None:
        crc = 0
        for event in events:
            if isinstance(event, Data):
                crc = crc32(event.chunk, crc)
            else:
                self.verify(event.name, event.crc, crc)

    def _check_end(self) -> None:
        """Everything has arrived, and the directory says the same."""
        missing = [s for s in self.storages.values() if self._name_of(s) not in self._records]
        if missing:
            raise TruncatedSourceError(
                f"the archive ends without {len(missing)} of its {len(self.storages)} storages, such as "
                f"{quoted(missing[0].key)} ({self._users(missing[0])}): its writer was interrupted"
            )
        count = 0
        for entry in read_directory(self._stream):
            count += 1
            record = self._records.get(entry.name)
            if record is None:
                raise SourceError(f"the archive's directory lists record {quoted(entry.name)}, which does not exist")
            told = (entry.position, entry.nbytes, entry.packed_nbytes, entry.crc, entry.method)
            seen = (record.position, record.nbytes, record.packed_nbytes, record.crc, record.method)
            if told != seen:
                raise SourceError(
                    f"record {quoted(entry.name)} has position, lengths, CRC-32 and method {seen}; "
                    f"the archive's directory says {told}"
                )
        if count != len(self._records):
            raise SourceError(f"the archive's directory lists {count} records, but {len(self._records)} were read")

    def _name_of(self, storage: Storage) -> str:
        return f"{self._prefix}{STORAGES}{storage.key}"

    def _users(self, storage: Storage) -> str:
        tensors = self.state_dict.tensors.items()
        names = [name for name, tensor in tensors if tensor.storage is storage]
        return f"tensor {listed(names, most=1)}" if names else "which no tensor uses"


def is_pickle(name: str) -> bool:
    """Whether a record of this name describes the checkpoint: it is directly below the prefix of all records."""
    return name.count("/") == 1 and name.endswith("/" + PICKLE)


def _header_at(stream: ByteStream, entry: DirectoryEntry) -> LocalHeader:
    """The header that ``entry`` points to; ``stream`` is then at the record's payload.  Raises: SourceError."""
    stream.seek(entry.position)
    header = read_local_header(stream)
    if header is None or header.name != entry.name:
        raise SourceError(
            f"the archive's directory points to byte {entry.position} for record {quoted(entry.name)}, "
            "which does not begin there"
        )
    return header


def _small(header: LocalHeader, chunks: Iterable[memoryview | bytes]) -> bytes:
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > SMALL_NBYTES:
            raise SourceError(f"record {quoted(header.name)} is longer than {SMALL_NBYTES} bytes")
    return bytes(data)


def _looks_like(names: list[str]) -> str:
    """What kind of archive it is, for the refusal."""
    tails = {name.partition("/")[2] for name in names}
    if "constants.pkl" in tails or any(tail.startswith("code/") for tail in tails):
        return "it looks like TorchScript: save the state_dict() of the module instead"
    if any(tail.startswith("data/weights/") or tail == "archive_format" for tail in tails):
        return "it looks like a torch.export program (.pt2): save its state_dict instead"
    if all(name.endswith(".npy") for name in names):
        return "it looks like a NumPy archive (.npz)"
    if any(tail.startswith("data/") for tail in tails):
        return "it may be TorchScript, an interrupted save, or packed again by another program"
    return f"its records: {listed(names)}"
