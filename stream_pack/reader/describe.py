"""What a pack holds and what fills its file, as text for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from stream_pack.format.align import PAGE_NBYTES
from stream_pack.format.front import KINDS
from stream_pack.format.index import NO_BUFFER, Index
from stream_pack.reader.pack import Pack
from stream_pack.text import human_nbytes, printable

__all__ = ["Description", "Part", "PayloadRow", "Row", "describe", "rows_of"]


MAX_CELL = 120
"""Characters of a name, or any other cell, in a table: one long name would widen every row."""


_TENSOR_PARTS = {"tensors", "payload constants", "named data", "program constants"}


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor.

    ``buffer`` numbers what holds its bytes: None for a tensor of none.  ``shared_with`` is the number (in the pack's
    order, from 0) of a tensor that has exactly the same bytes, ``inside`` that of one whose bytes contain these; both
    None for most.  Not their names: a long one would come again with each of many.  ``page_aligned``: it starts at a
    multiple of 16,384, so that it can be an MTLBuffer of its own.

    Units: bytes; ``file_offset`` counts from the pack's first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file_offset: int
    buffer: int | None
    shared_with: int | None
    inside: int | None
    page_aligned: bool
    fault: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes bytes of the file.  Parts that come more than once are added up."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PayloadRow:
    """What one delegate of an ExecuTorch program receives.

    ``name`` is the method and the delegate's number in it, ``backend`` the delegate's id.  ``kind``: ``"mps"``,
    ``"xnnpack"``, ``"ptd"``, ``"pack"`` or ``"other"``.  ``constants`` stand in it; those with the keys ``keyed`` are
    among the named data, of the program or of another file.  ``also_used_by``: other delegates that share it.

    Units: bytes; ``file_offset`` counts from the program's first byte.
    """

    name: str
    backend: str
    kind: str
    file_offset: int
    nbytes: int
    constants: int
    keyed: tuple[str, ...]
    also_used_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A pack, or a file that ExecuTorch wrote, described.

    ``nbytes`` is the length of the pack; the nbytes of all ``parts`` add up to exactly that.  ``tensors_nbytes``
    counts every tensor as if it stood alone, so it is more than the part "tensors" (of a program: "payload constants",
    "named data" and "program constants") by what sharing saves.
    ``head``: of a pack, whose header it begins with: ``"mps"``, ``"xnnpack"`` or ``"ptd"``.

    Of ExecuTorch's files only: the ``payloads`` of a program; how many constants lie in other files (``external``);
    what is wrong (``faults``).
    """

    path: str
    kind: str
    nbytes: int
    tensors_nbytes: int
    metadata: dict[str, str]
    alignment: tuple[int, int] | None
    block_nbytes: int | None
    rows: tuple[Row, ...]
    parts: tuple[Part, ...]
    head: str | None = None
    payloads: tuple[PayloadRow, ...] = ()
    external: int = 0
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """All fields, as values that the json module takes."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "tensors": len(self.rows),
            "rows": [
                {field.name: getattr(row, field.name) for field in fields(row)} for row in self.rows
            ],
            "parts": [asdict(part) for part in self.parts],
            "payloads": [asdict(payload) for payload in self.payloads],
        }

    def to_text(self, width: int | None = None) -> str:
        """Tables for a person; names are cut to fit ``width`` columns, and to 120 characters in any case."""
        return "\n".join(_lines(self, width))


def describe(pack: Pack) -> Description:
    """Describe an open pack, or raw payload.  No byte of the region is read."""
    contents = pack.contents
    index = contents.index
    raw = pack.kind != "pack"
    return Description(
        path=pack.path,
        kind=pack.kind,
        nbytes=contents.nbytes,
        tensors_nbytes=int(index.tensor_nbytes.sum()),
        metadata=pack.metadata,
        alignment=None if raw else (index.alignment.small, index.alignment.large),
        block_nbytes=None if raw else index.block_nbytes,
        head=None if raw else pack.head.kind.name,
        rows=tuple(rows_of(index, contents.region_file_offset, contents.faults)),
        parts=tuple(_parts(pack)),
    )


def rows_of(index: Index, region_file_offset: int, faults: dict[int, str]) -> Iterator[Row]:
    """A row for each tensor of an index."""
    inside, same = _sharing(index)
    columns = (index.offsets, index.tensor_nbytes, index.tensor_buffers)
    rows = zip(*(column.tolist() for column in columns))
    for tensor, (offset, nbytes, buffer) in enumerate(rows):
        yield Row(
            name=index.name(tensor),
            dtype=index.dtype_name(tensor),
            shape=index.shape(tensor),
            nbytes=nbytes,
            file_offset=region_file_offset + offset,
            buffer=None if buffer == NO_BUFFER else buffer,
            shared_with=same.get(tensor),
            inside=inside.get(tensor),
            page_aligned=nbytes > 0 and (region_file_offset + offset) % PAGE_NBYTES == 0,
            fault=faults.get(tensor),
        )


def _sharing(index: Index) -> tuple[dict[int, int], dict[int, int]]:
    """For tensors that share bytes: the larger one that each lies inside, and another one that has the same bytes."""
    inside: dict[int, int] = {}
    same: dict[int, int] = {}
    held = np.flatnonzero(index.tensor_buffers != NO_BUFFER)
    order = held[np.argsort(index.tensor_buffers[held], kind="stable")]
    buffers = index.tensor_buffers[order]
    for group in np.split(order, np.flatnonzero(buffers[1:] != buffers[:-1]) + 1):
        if len(group) < 2:
            continue
        longest = int(group[np.argmax(index.tensor_nbytes[group])])
        begin = int(index.tensor_starts[longest])
        end = begin + int(index.tensor_nbytes[longest])
        first: dict[tuple[int, int], int] = {}
        for tensor in group.tolist():
            extent = (int(index.tensor_starts[tensor]), int(index.tensor_nbytes[tensor]))
            if extent in first:
                same[tensor] = first[extent]
                same.setdefault(first[extent], tensor)
            else:
                first[extent] = tensor
            # Overlapping constants of a raw payload need not contain each other.
            if begin <= extent[0] and extent[0] + extent[1] <= end and extent[1] < end - begin:
                inside[tensor] = longest
    return inside, same


def _parts(pack: Pack) -> Iterator[Part]:
    contents = pack.contents
    index = contents.index
    if pack.kind == "pack":
        head = pack.head
        index_end = head.index_file_offset + head.index_nbytes
        yield Part("header", head.kind.header_nbytes)
        # The graph with the few zeros that align the index: that of an MPS payload does not say where it ends.
        yield Part("graph", head.index_file_offset - head.kind.header_nbytes)
        yield Part("index", head.index_nbytes)
        yield Part("head padding", head.region_file_offset - head.locator_nbytes - index_end)
        yield Part("locator", head.locator_nbytes)
    else:
        nbytes = KINDS[pack.kind].header_nbytes
        yield Part("header", nbytes)
        yield Part("graph", contents.region_file_offset - nbytes)
    stored = int(index.buffer_nbytes.sum())
    yield Part("tensors", stored)
    yield Part("region padding", contents.region_nbytes - stored)
    if pack.kind == "pack":
        yield Part("checksums", index.checksums_nbytes)
        yield Part("footer", pack.head.pack_nbytes - pack.head.footer_file_offset)


def _cell(text: str) -> str:
    return _fit(printable(text[: MAX_CELL + 1]), MAX_CELL)


def _flags(row: Row, rows: Sequence[Row]) -> str:
    """All that is special about a tensor, in words."""
    words = []
    if row.shared_with is not None:
        words.append(f"tied with {_cell(rows[row.shared_with].name)}")
    if row.inside is not None:
        words.append(f"in {_cell(rows[row.inside].name)}")
    if row.page_aligned:
        words.append("page")
    if row.fault is not None:
        words.append(f"FAULT: {row.fault}")
    return ", ".join(words)


def _lines(description: Description, width: int | None) -> Iterator[str]:
    rows = [
        (
            _cell(row.name),
            _cell(row.dtype),
            _cell(f"[{', '.join(map(str, row.shape))}]"),
            str(row.nbytes),
            str(row.file_offset),
            _flags(row, description.rows),
        )
        for row in description.rows
    ]
    yield from _table(
        ("name", "dtype", "shape", "nbytes", "file offset", ""), rows, right={3, 4}, width=width
    )
    yield ""
    if description.payloads:
        yield from _payload_table(description.payloads)
        yield ""
    total = description.nbytes
    parts = [
        (
            part.name,
            str(part.nbytes),
            human_nbytes(part.nbytes),
            f"{100 * part.nbytes / total:.2f} %",
        )
        for part in description.parts
    ]
    parts.append(("file", str(total), human_nbytes(total), ""))
    yield from _table(("what fills the file", "nbytes", "", ""), parts, right={1, 2, 3}, width=None)
    yield ""
    shared = description.tensors_nbytes - sum(
        part.nbytes for part in description.parts if part.name in _TENSOR_PARTS
    )
    saved = f", {human_nbytes(shared)} of them shared" if shared > 0 else ""
    count = len(description.rows)
    yield (
        f"{count} {'tensor' if count == 1 else 'tensors'}, {description.tensors_nbytes} bytes "
        f"({human_nbytes(description.tensors_nbytes)}){saved}"
    )
    if description.external:
        yield f"{description.external} more {'lies' if description.external == 1 else 'lie'} in other files"
    for fault in description.faults:
        yield f"fault: {printable(fault)}"
    if description.alignment is not None and description.block_nbytes is not None:
        small, large = description.alignment
        yield f"aligned to {small} bytes, large ones to {large}; checksums of {human_nbytes(description.block_nbytes)}"
    if description.head not in (None, "mps"):
        yield f"ExecuTorch takes it for {KINDS[description.head].pack_as}"
    for key, value in description.metadata.items():
        yield f"metadata {printable(key)} = {printable(value)}"


def _payload_table(payloads: Sequence[PayloadRow]) -> Iterator[str]:
    rows = []
    for payload in payloads:
        words = [f"{payload.constants} constants"] if payload.constants else []
        words += [f"{len(payload.keyed)} by key"] if payload.keyed else []
        words += [f"inspect with --offset {payload.file_offset}"] if payload.kind == "pack" else []
        words += (
            [f"also of {_cell(', '.join(payload.also_used_by))}"] if payload.also_used_by else []
        )
        rows.append(
            (
                _cell(payload.name),
                _cell(payload.backend),
                payload.kind,
                str(payload.nbytes),
                str(payload.file_offset),
                ", ".join(words),
            )
        )
    head = ("payload of", "backend", "kind", "nbytes", "file offset", "")
    yield from _table(head, rows, right={3, 4}, width=None)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int], width: int | None
) -> Iterator[str]:
    """Columns side by side, ``right`` ones flush right; the first gives way when ``width`` is too small."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    if width is not None:
        rest = sum(widths[1:]) + 2 * (len(widths) - 1)
        widths[0] = max(min(widths[0], width - rest), len(head[0]), 12)
    for row in (head, *rows):
        cells = [_fit(cell, size) for cell, size in zip(row, widths)]
        yield "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(cells, widths))
        ).rstrip()


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
