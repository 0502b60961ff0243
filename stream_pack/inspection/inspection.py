"""The result of an inspection: tensors, parts of the file, payloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields

from stream_pack.format.header_kinds import KINDS
from stream_pack.text import counted, human_nbytes, printable

__all__ = ["InspectedPart", "InspectedPayload", "InspectedTensor", "Inspection"]

MAX_CELL = 120
"""Characters of a cell: one long name would widen every row."""

_TENSOR_PARTS = {"tensors", "payload constants", "named data", "program constants"}


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor.

    ``buffer`` is the number of the buffer with its bytes, None for a tensor of 0 bytes.  ``shared_with`` is the number
    (in file order, from 0) of a tensor with exactly the same bytes, ``inside`` that of one whose bytes contain these;
    both are usually None; numbers, so that a long name is not repeated.  ``page_aligned``: it
    starts at a multiple of 16,384, so that it can have its own MTLBuffer.  ``dim_order``, of a tensor of ExecuTorch's
    that is not row-major, lists its dims as they follow in memory.  ``notes`` are the texts attached to it.

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
    dim_order: tuple[int, ...] | None
    notes: dict[str, str]


@dataclass(frozen=True, slots=True)
class InspectedPart:
    """A part of the file.  Parts of the same kind are added up."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class InspectedPayload:
    """What one delegate of an ExecuTorch program receives.

    ``name`` is the method and the delegate's number in it, ``backend`` the delegate's id.  ``kind``: ``"mps"``,
    ``"xnnpack"``, ``"ptd"``, ``"pack"`` or ``"other"``.  ``constants`` are in it; those with the keys ``keyed`` are
    in named data, of the program or of another file.  ``also_used_by``: other delegates that share it.

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
class Inspection:
    """What :func:`stream_pack.inspect` says of a pack, or of a file that ExecuTorch wrote.

    ``nbytes`` is the length of the pack; the nbytes of all ``parts`` add up to exactly that.  ``tensors_nbytes``
    counts every tensor as if it shared no bytes, so it exceeds the part "tensors" (of a program: "payload constants",
    "named data" and "program constants") by what sharing saves.

    Of a pack only: ``alignment`` (of small and large tensors) and ``block_nbytes``; ``head``, whose header it begins
    with: ``"mps"``, ``"xnnpack"`` or ``"ptd"``; ``checksum``, the root checksum (see :attr:`Pack.checksum`); ``metal``,
    how a Mac will use it, in a line.

    Of ExecuTorch's files only: ``payloads`` of a program; ``external``, how many constants are in other files;
    ``faults``, what is wrong.

    Units: bytes.
    """

    path: str
    kind: str
    nbytes: int
    tensors_nbytes: int
    metadata: dict[str, str]
    alignment: tuple[int, int] | None
    block_nbytes: int | None
    rows: tuple[InspectedTensor, ...]
    parts: tuple[InspectedPart, ...]
    head: str | None = None
    checksum: int | None = None
    metal: str | None = None
    payloads: tuple[InspectedPayload, ...] = ()
    external: int = 0
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """All fields, as values that the json module takes; the checksum as 16 hex digits."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "tensors": len(self.rows),
            "rows": [{name: getattr(row, name) for name in row.__slots__} for row in self.rows],
            "parts": [asdict(part) for part in self.parts],
            "payloads": [asdict(payload) for payload in self.payloads],
            "checksum": None if self.checksum is None else f"{self.checksum:016x}",
        }

    def to_text(self, width: int | None = None) -> str:
        """Tables; names are cut to fit ``width`` columns, and to 120 characters in any case."""
        return "\n".join(_lines(self, width))


def _flags(row: InspectedTensor, rows: Sequence[InspectedTensor]) -> str:
    """What is special about a tensor, in words."""
    words = []
    if row.shared_with is not None:
        words.append(f"tied with {_cell(rows[row.shared_with].name)}")
    if row.inside is not None:
        words.append(f"in {_cell(rows[row.inside].name)}")
    if row.page_aligned:
        words.append("page")
    if row.dim_order is not None:
        words.append(f"dim order {' '.join(map(str, row.dim_order))}")
    words += [_cell(f"{key} = {value}") for key, value in row.notes.items()]
    if row.fault is not None:
        words.append(f"FAULT: {row.fault}")
    return ", ".join(words)


def _lines(inspection: Inspection, width: int | None) -> Iterator[str]:
    rows = [
        (
            _cell(row.name),
            _cell(row.dtype),
            _cell(f"[{', '.join(map(str, row.shape))}]"),
            str(row.nbytes),
            str(row.file_offset),
            _flags(row, inspection.rows),
        )
        for row in inspection.rows
    ]
    yield from _table(("name", "dtype", "shape", "nbytes", "file offset", ""), rows, right={3, 4}, width=width)
    yield ""
    if inspection.payloads:
        yield from _payload_table(inspection.payloads)
        yield ""
    total = inspection.nbytes
    parts = [
        (name, str(nbytes), human_nbytes(nbytes), f"{100 * nbytes / total:.2f} %")
        for name, nbytes in map(astuple, inspection.parts)
    ]
    parts.append(("file", str(total), human_nbytes(total), ""))
    yield from _table(("what fills the file", "nbytes", "", ""), parts, right={1, 2, 3}, width=None)
    yield ""
    yield from _remarks(inspection)


def _remarks(inspection: Inspection) -> Iterator[str]:
    """What follows the tables."""
    shared = inspection.tensors_nbytes - sum(part.nbytes for part in inspection.parts if part.name in _TENSOR_PARTS)
    saved = f", {human_nbytes(shared)} of them shared" if shared > 0 else ""
    yield (
        f"{counted(len(inspection.rows), 'tensor')}, {inspection.tensors_nbytes} bytes "
        f"({human_nbytes(inspection.tensors_nbytes)}){saved}"
    )
    if inspection.external:
        yield f"{inspection.external} more {'is' if inspection.external == 1 else 'are'} in other files"
    for fault in inspection.faults:
        yield f"fault: {printable(fault)}"
    if inspection.alignment is not None and inspection.block_nbytes is not None:
        small, large = inspection.alignment
        yield f"aligned to {small} bytes, large ones to {large}; checksums of {human_nbytes(inspection.block_nbytes)}"
    if inspection.checksum is not None:
        yield f"root checksum {inspection.checksum:016x}"
    if inspection.head not in (None, "mps"):
        yield f"ExecuTorch reads it as {KINDS[inspection.head].pack_as}"
    for key, value in inspection.metadata.items():
        yield f"metadata {printable(key)} = {printable(value)}"
    if inspection.metal is not None:
        yield inspection.metal


def _payload_table(payloads: Sequence[InspectedPayload]) -> Iterator[str]:
    rows = []
    for payload in payloads:
        words = [counted(payload.constants, "constant")] if payload.constants else []
        words += [f"{len(payload.keyed)} by key"] if payload.keyed else []
        words += [f"inspect with --offset {payload.file_offset}"] if payload.kind == "pack" else []
        if payload.also_used_by:
            words.append(f"also of {_cell(', '.join(payload.also_used_by))}")
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


def _cell(text: str) -> str:
    """``text`` for a table: printable, and cut to MAX_CELL characters."""
    return _fit(printable(text[: MAX_CELL + 1]), MAX_CELL)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int], width: int | None) -> Iterator[str]:
    """Columns side by side, ``right`` ones flush right; the first is cut when ``width`` is too small."""
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
