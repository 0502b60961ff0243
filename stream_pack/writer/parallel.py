"""Writing one pack from several processes or threads at once, each with its own byte ranges of the region.

One of them owns the file: a :class:`ParallelWriter` plans the pack, writes its head, and at the end checksums and
footer.  All of them, including the owner, write tensors or parts of tensors through a :class:`PartWriter`.  They
exchange a path and then a few numbers per range, over any channel::

    # rank 0                                            # every rank, 0 too
    with ParallelWriter(path, specs) as pack:           with PartWriter(unfinished_path) as writer:
        ... send pack.unfinished_path to all ...            writer.write("wq", my_rows, begin=where_they_belong)
        ... gather everybody's part ...                     part = writer.finish()
        pack.commit(parts)                              ... send part to rank 0 ...
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from stream_pack.arguments.paths import require_path
from stream_pack.errors import FormatError, OptionError, SourceError, StateError, UnknownTensorError
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.checksum import BLOCK_NBYTES, BlockHasher, xxh3
from stream_pack.format.head import Head
from stream_pack.format.header import To
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.format.proof import END_NBYTES, START_NBYTES, prove_head, prove_header, prove_reach
from stream_pack.format.records import Footer
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.text import listed, quoted, shown
from stream_pack.writer.incremental import BytesLike, Specs, UnfinishedPack, chunks_of, require_name, specified
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.sink import FileSink, file_identity
from stream_pack.writer.writeback import WritebackFile

__all__ = ["ParallelWriter", "Part", "PartWriter"]

READ_BACK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one :class:`PartWriter` has written; it can be pickled.

    Range ``r`` is bytes ``[begins[r], ends[r])`` of the pack's buffer ``buffers[r]``.  ``checksums[k]`` is that of
    block number ``blocks[k]``, which is whole in a single range.  ``attempt`` tells the :class:`ParallelWriter` by the
    name of its unfinished file, 64 bits of which are random: a path's machine, folder and inode may look different to
    each process.  ``head_checksum`` is that of the pack's head, the same for every attempt at the same pack.
    """

    attempt: str
    head_checksum: int
    buffers: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    blocks: NDArray[np.int64]
    checksums: NDArray[np.uint64]


class ParallelWriter(UnfinishedPack):
    """A pack at ``path``, whose tensors other processes write too; all must see its file system.

    ``specs`` and the options are those of :class:`~stream_pack.Writer`, and so are the bytes of the pack: they do not
    depend on which process wrote what.  ``unfinished_path`` is the file's path until :meth:`commit`, for
    :class:`PartWriter`.  Leaving the ``with`` without a commit abandons the pack: ``path`` is left unchanged.

    Raises: OptionError; SourceError, LimitError for invalid specs; OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Specs,
        *,
        to: To = "mps",
        metadata: Mapping[str, str] | None = None,
        alignment: Alignment = DEFAULT_ALIGNMENT,
        block_nbytes: int = BLOCK_NBYTES,
    ) -> None:
        options = ConvertOptions(to=to, metadata=metadata, alignment=alignment, block_nbytes=block_nbytes)
        catalog = specified(specs, metadata)
        sink = FileSink(path)
        super().__init__(sink, catalog, options)
        try:
            sink.sync()  # others read the head, perhaps on other machines
        except BaseException:
            self.abandon()
            raise
        self.unfinished_path = sink.temporary

    def commit(self, parts: Iterable[Part]) -> None:
        """Complete the pack from all parts.

        Blocks that no single ``write`` held whole are read back to be hashed: at most one at each end of a range.

        Raises: StateError for bytes that are missing or were written twice, naming the tensors, and for a part of
        another pack or of another attempt at this one; OptionError; OSError.  The pack is then abandoned.
        """
        self._require_open()
        self._closed = True
        with self._sink:
            self._pack.finish_with(self._checksums(_parts(parts)).tobytes())

    def _checksums(self, parts: Sequence[Part]) -> NDArray[np.uint64]:
        """The checksums of all blocks, in file order."""
        self._check_identity(parts)
        index = self._pack.head.index
        _check_coverage(index, parts)
        checksums = np.zeros(index.checksums_nbytes // 8, "<u8")
        known = np.zeros(len(checksums), bool)
        for part in parts:
            checksums[part.blocks] = part.checksums
            known[part.blocks] = True
        # Opened only now: on a network file system, only a later open sees what other machines have written.
        with closing(ByteStream.open_path(self.unfinished_path)) as stream:
            for block in np.flatnonzero(~known).tolist():
                checksums[block] = self._read_back(stream, block)
        return checksums

    def _check_identity(self, parts: Sequence[Part]) -> None:
        """Raises: StateError for a part whose bytes are not in this file."""
        for number, part in enumerate(parts):
            if part.head_checksum != self._pack.head.checksum:
                raise StateError(f"parts[{number}] was written into another pack")
            if part.attempt != _attempt(self.unfinished_path):
                raise StateError(
                    f"parts[{number}] was written into another attempt at this pack, {quoted(part.attempt)}: send its "
                    "writer the unfinished_path of this one, and write it again"
                )

    def _read_back(self, stream: ByteStream, block: int) -> int:
        buffer, _, begin, end = self._pack.head.index.block_range(block)
        stream.seek(_file_offset(self._pack.head, buffer) + begin)
        what = "a block read back"
        return xxh3(stream.chunks(end - begin, chunk_nbytes=READ_BACK_NBYTES, what=what))


class PartWriter:
    """Writes some of a pack's bytes into the file at ``unfinished_path``, which a :class:`ParallelWriter` has begun.

    Not thread-safe: several threads may write at once, each with its own PartWriter.  Leaving the ``with`` closes it.

    Copies: none of the chunks.
    Raises: FormatError and its subclasses for any other file; OSError.
    """

    def __init__(self, unfinished_path: str | os.PathLike[str]) -> None:
        require_path("unfinished_path", unfinished_path, "file")
        self._path = os.path.realpath(unfinished_path)
        self._head = _read_head(unfinished_path)
        fd = os.open(unfinished_path, os.O_WRONLY | os.O_CLOEXEC)
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._output = WritebackFile(fd, name=os.fspath(unfinished_path))
        self._ranges: list[tuple[int, int, int]] = []
        self._runs: list[tuple[int, list[int]]] = []
        self._usable = True

    def write(self, name: str, chunks: BytesLike | Iterable[BytesLike], *, begin: SupportsIndex = 0) -> None:
        """Write bytes of one tensor, little-endian and row-major, from its byte ``begin`` on: one bytes-like object or
        an iterable of them.

        Row ``r`` of a tensor begins at byte ``r`` times the length of a row.  Ranges may be written in any order, but
        no byte twice, not even by another process.  A chunk's memory may be reused as soon as the next chunk is
        requested, or this returns.

        Raises: UnknownTensorError; SourceError for bytes outside the tensor; StateError when the pack is committed or
        abandoned; OSError; any error of ``chunks``.  After an error this part cannot be finished.
        """
        self._require_usable()
        self._usable = False
        self._write(name, chunks, _whole(begin))
        self._usable = True

    def _require_usable(self) -> None:
        if not self._close.alive:
            raise StateError("this PartWriter is closed")
        if not self._usable:
            raise StateError("an earlier write failed: this part cannot be finished")
        # After the commit this descriptor is that of the target; after an abandon, that of a deleted file.
        if file_identity(self._path) != file_identity(self._fd):
            raise StateError(f"the pack of {quoted(self._path)} was committed or abandoned: this part is too late")

    def _write(self, name: str, chunks: BytesLike | Iterable[BytesLike], begin: int) -> None:
        index = self._head.index
        require_name(name)
        tensor = index.find(name)
        if tensor is None:
            raise UnknownTensorError(f"no tensor {quoted(name)} in this pack", tensor=name)
        nbytes, buffer = int(index.tensor_nbytes[tensor]), int(index.tensor_buffers[tensor])
        if not 0 <= begin <= nbytes:
            raise SourceError(f"tensor {quoted(name)} has {nbytes} bytes: no range can begin at byte {begin}")
        file_offset = 0 if buffer == NO_BUFFER else _file_offset(self._head, buffer)
        hasher = BlockHasher(index.block_nbytes)
        skip = -begin % index.block_nbytes  # the rest of a block that began earlier
        checksums: list[int] = []
        end = begin
        for view in chunks_of(chunks):
            if len(view) > nbytes - end:
                raise SourceError(
                    f"tensor {quoted(name)} has {nbytes} bytes, too few for the chunks from byte {begin} on"
                )
            if len(view):
                self._output.write(file_offset + end, [view])
                checksums += hasher.update(view[skip:])
                skip = max(0, skip - len(view))
                end += len(view)
        if end == nbytes:
            checksums += hasher.finish()
        if end > begin:
            self._ranges.append((buffer, begin, end))
        if checksums:
            first = index.first_block(buffer) + -(-begin // index.block_nbytes)
            self._runs.append((first, checksums))

    def finish(self) -> Part:
        """Flush to disk, close, and return what was written.

        Raises: StateError after a failed write, or when the pack is committed or abandoned; OSError.
        """
        self._require_usable()
        os.fsync(self._fd)
        self._close()
        ranges = np.array(self._ranges, np.int64).reshape(-1, 3)
        blocks = [np.arange(first, first + len(run)) for first, run in self._runs]
        return Part(
            attempt=_attempt(self._path),
            head_checksum=self._head.checksum,
            buffers=ranges[:, 0],
            begins=ranges[:, 1],
            ends=ranges[:, 2],
            blocks=np.concatenate([*blocks, np.empty(0, np.int64)]),
            checksums=np.array([value for _, run in self._runs for value in run], np.uint64),
        )

    def close(self) -> None:
        """Close without finishing.  May be called twice."""
        self._close()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _whole(begin: SupportsIndex) -> int:
    try:
        return operator.index(begin)
    except TypeError:
        raise OptionError(f"begin={shown(begin)}: expected a whole number") from None


def _attempt(unfinished_path: str) -> str:
    return os.path.basename(unfinished_path)


def _parts(parts: object) -> list[Part]:
    given = []
    for part in parts if isinstance(parts, Iterable) else [parts]:
        if not isinstance(part, Part):
            raise OptionError(f"parts: expected an iterable of what PartWriter.finish() returned, got {shown(part)}")
        given.append(part)
    return given


def _read_head(path: str | os.PathLike[str]) -> Head:
    with open(path, "rb") as file:
        header = prove_header(file.read(START_NBYTES))
        nbytes = os.fstat(file.fileno()).st_size
        prove_reach(header, nbytes)
        file.seek(nbytes - END_NBYTES)
        if file.read(END_NBYTES) == Footer.MAGIC:
            raise FormatError(f"{quoted(os.fspath(path))} is a complete pack: a part is written before the commit")
        file.seek(0)
        data = memoryview(file.read(header.region_file_offset))
        return prove_head(data, header, end=lambda: None)


def _file_offset(head: Head, buffer: int) -> int:
    return head.region_file_offset + int(head.index.buffer_offsets[buffer])


def _check_coverage(index: Index, parts: Sequence[Part]) -> None:
    """Raises: StateError unless the parts hold every byte of every buffer once."""
    columns = ((part.buffers, part.begins, part.ends) for part in parts)
    ranges = np.hstack([np.empty((3, 0), np.int64), *map(np.stack, columns)])
    buffers, begins, ends = ranges[:, np.lexsort((ranges[1], ranges[0]))]
    twice = np.flatnonzero((buffers[1:] == buffers[:-1]) & (begins[1:] < ends[:-1]))
    if len(twice):
        k = int(twice[0])
        raise StateError(
            f"bytes {int(begins[k + 1])} to {min(int(ends[k]), int(ends[k + 1]))} of tensor "
            f"{quoted(_name(index, int(buffers[k])))} were written twice: of several processes "
            "with the same data, only one may write it"
        )
    held = np.zeros(len(index.buffer_nbytes), np.int64)
    np.add.at(held, buffers, ends - begins)
    lacking = np.flatnonzero(held < index.buffer_nbytes).tolist()
    if lacking:
        names = listed((_name(index, buffer) for buffer in lacking), total=len(lacking))
        missing = int((index.buffer_nbytes - held).sum())
        raise StateError(f"the parts lack {missing} bytes of the tensors {names}")


def _name(index: Index, buffer: int) -> str:
    return index.name(index.first_tensor(buffer))
