"""A zip archive of stored records, planned: every place is known before the first byte, checksums come with the data.

Every record with bytes is "streamed" (flag bit 3): its CRC-32 is in a descriptor after the payload and in the
directory, so that nothing is patched back and a pipe gets the same bytes as a file.

Source: APPNOTE.TXT 6.3.10, sections 4.3 to 4.5.  Where zip64 is needed, and that payloads are aligned by an extra
field, is as torch writes it (caffe2/serialize/inline_container.cc, ``getPadding``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError
from stream_pack.extraction.file_plan import FilePlan
from stream_pack.pipeline.source import Requests
from stream_pack.sources.torch_save.zip_records import (
    DESCRIPTOR,
    DESCRIPTOR_NARROW,
    DESCRIPTOR_WIDE,
    END,
    END_FIELDS,
    ENTRY,
    ENTRY_FIELDS,
    FLAG_STREAMED,
    FLAG_UTF8,
    LOCAL,
    LOCAL_FIELDS,
    STORED,
    U16_MAX,
    U32_MAX,
    ZIP64_END,
    ZIP64_END_FIELDS,
    ZIP64_EXTRA,
    ZIP64_LOCATOR,
    ZIP64_LOCATOR_FIELDS,
)
from stream_pack.text import quoted

__all__ = ["ZipPlan"]

VERSION, VERSION_ZIP64 = 20, 45
DATE = 1 << 5 | 1  # the first of January 1980, where MS-DOS dates begin
PADDING_EXTRA = 0x4246  # "FB", torch's
WIDE_NBYTES = U32_MAX
"""Lengths and offsets from this on are in fields of 8 bytes."""

_FIELD_NBYTES = 4  # the head of an extra field: its kind and its length


class ZipPlan:
    """Places of records that follow one another.

    Payloads begin at multiples of ``alignment``.  A payload is content that is known now, then data that comes later.
    """

    def __init__(self, *, alignment: int) -> None:
        self._alignment = alignment
        self._names: list[bytes] = []
        self._contents: list[bytes] = []
        self._data_nbytes: list[int] = []
        self._offsets: list[int] = []
        self._end = 0

    def add(self, name: str, content: bytes = b"", *, data_nbytes: int = 0) -> None:
        """Append a record of ``content`` and then ``data_nbytes`` bytes.  Raises: LimitError for a name too long."""
        encoded = name.encode()
        if len(encoded) > U16_MAX:
            raise LimitError(
                f"{quoted(name)} is a name of {len(encoded)} bytes: a zip archive takes at most {U16_MAX}",
                value=len(encoded),
                limit=U16_MAX,
            )
        self._names.append(encoded)
        self._contents.append(content)
        self._data_nbytes.append(data_nbytes)
        self._offsets.append(self._end)
        record = len(self._names) - 1
        self._end += len(self._front(record)) + data_nbytes + len(self._descriptor(record, 0))

    def file_plan(self, requests: Requests, rows: NDArray[np.int64]) -> FilePlan:
        """The file: its records with data hold ``requests``, in the order of both; ``rows``: as in the plan."""
        holders = [record for record, nbytes in enumerate(self._data_nbytes) if nbytes]
        offsets = [self._offsets[record] + len(self._front(record)) for record in holders]
        directory_nbytes = sum(len(self._entry(record, 0)) for record in range(len(self._names)))
        return FilePlan(
            requests=requests,
            rows=rows,
            offsets=np.array(offsets, np.int64),
            nbytes=self._end + directory_nbytes + len(self._closing(0)),
            frame=_ZipFrame(self, holders),
        )

    def _wide(self, record: int) -> bool:
        """Whether the fields that describe a record have 8 bytes."""
        return self._payload_nbytes(record) >= WIDE_NBYTES or self._offsets[record] >= WIDE_NBYTES

    def _payload_nbytes(self, record: int) -> int:
        return len(self._contents[record]) + self._data_nbytes[record]

    def _flags(self, record: int) -> int:
        return FLAG_UTF8 | (FLAG_STREAMED if self._payload_nbytes(record) else 0)

    def _front(self, record: int) -> bytes:
        """The record up to its data."""
        name = self._names[record]
        wide = self._wide(record)
        extra = _field(ZIP64_EXTRA, bytes(16)) if wide else b""
        begin = self._offsets[record] + len(LOCAL) + LOCAL_FIELDS.size + len(name) + len(extra) + _FIELD_NBYTES
        extra += _field(PADDING_EXTRA, bytes(-begin % self._alignment))
        version, flags = VERSION_ZIP64 if wide else VERSION, self._flags(record)
        fields = LOCAL_FIELDS.pack(version, flags, STORED, 0, DATE, 0, 0, 0, len(name), len(extra))
        return b"".join((LOCAL, fields, name, extra, self._contents[record]))

    def _descriptor(self, record: int, crc: int) -> bytes:
        nbytes = self._payload_nbytes(record)
        if not nbytes:
            return b""
        layout = DESCRIPTOR_WIDE if self._wide(record) else DESCRIPTOR_NARROW
        return DESCRIPTOR + layout.pack(crc, nbytes, nbytes)

    def _entry(self, record: int, crc: int) -> bytes:
        """What the directory says of the record."""
        name, nbytes, offset = self._names[record], self._payload_nbytes(record), self._offsets[record]
        large = [number for number in (nbytes, nbytes, offset) if number >= WIDE_NBYTES]
        extra = _field(ZIP64_EXTRA, b"".join(number.to_bytes(8, "little") for number in large)) if large else b""
        version = VERSION_ZIP64 if self._wide(record) else VERSION
        lengths = (_narrow(nbytes),) * 2
        fields = ENTRY_FIELDS.pack(
            *(version, version, self._flags(record), STORED, 0, DATE, crc, *lengths),
            *(len(name), len(extra), 0, 0, 0, 0, _narrow(offset)),
        )
        return b"".join((ENTRY, fields, name, extra))

    def _closing(self, directory_nbytes: int) -> bytes:
        """The records behind the directory; those of zip64 always, as torch has them."""
        count, begin = len(self._names), self._end
        place = (count, count, directory_nbytes, begin)
        wide = ZIP64_END_FIELDS.pack(ZIP64_END_FIELDS.size - 8, VERSION_ZIP64, VERSION_ZIP64, 0, 0, *place)
        locator = ZIP64_LOCATOR_FIELDS.pack(0, begin + directory_nbytes, 1)
        short = (min(count, U16_MAX),) * 2
        end = END_FIELDS.pack(0, 0, *short, _narrow(directory_nbytes), _narrow(begin), 0)
        return b"".join((ZIP64_END, wide, ZIP64_LOCATOR, locator, END, end))


class _ZipFrame:
    """:class:`stream_pack.extraction.file_plan.Frame` of an archive; ``holders``: the record of each buffer."""

    def __init__(self, plan: ZipPlan, holders: list[int]) -> None:
        self._plan = plan
        self._holders = holders

    def before(self, buffer: int) -> bytes:
        first = self._holders[buffer - 1] + 1 if buffer else 0
        record = self._holders[buffer]
        return b"".join((*self._whole(first, record), self._plan._front(record)))

    def crc_before(self, buffer: int) -> int:
        return crc32(self._plan._contents[self._holders[buffer]])

    def after(self, buffer: int, crc: int) -> bytes:
        return self._plan._descriptor(self._holders[buffer], crc)

    def tail(self, crcs: Sequence[int]) -> bytes:
        plan = self._plan
        records = len(plan._names)
        last = self._holders[-1] + 1 if self._holders else 0
        known = dict(zip(self._holders, crcs))
        entries = [plan._entry(record, known.get(record) or crc32(plan._contents[record])) for record in range(records)]
        directory = b"".join(entries)
        return b"".join((*self._whole(last, records), directory, plan._closing(len(directory))))

    def _whole(self, first: int, last: int) -> Iterator[bytes]:
        """Records that hold nothing but content."""
        for record in range(first, last):
            yield self._plan._front(record)
            yield self._plan._descriptor(record, crc32(self._plan._contents[record]))


def _field(kind: int, data: bytes) -> bytes:
    """An extra field."""
    return kind.to_bytes(2, "little") + len(data).to_bytes(2, "little") + data


def _narrow(number: int) -> int:
    """A field of 4 bytes: the number, or what says that it is in one of 8."""
    return number if number < WIDE_NBYTES else U32_MAX
