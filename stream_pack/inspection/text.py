"""An inspection as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple

from stream_pack.format.header_kinds import KINDS
from stream_pack.inspection.choice import Choice
from stream_pack.inspection.folding import Folded, fold
from stream_pack.inspection.inspection import InspectedPayload, InspectedTensor, Inspection
from stream_pack.text import counted, human_nbytes, printable

__all__ = ["lines"]

MAX_CELL = 120
"""Characters of a cell: one long name would widen every row."""

MAX_LINES = 20
"""Lines of one kind after the tables, where a list is folded: what is refused, metadata."""

_TENSOR_PARTS = {"tensors", "payload constants", "named data", "program constants"}


def lines(inspection: Inspection, choice: Choice, *, width: int | None, limit: int | None, fold: bool) -> Iterator[str]:
    """See :meth:`Inspection.to_text`."""
    yield from _tensor_table(inspection, choice, width=width, limit=limit, folded=fold)
    yield ""
    if inspection.payloads:
        yield from _payload_table(inspection.payloads)
        yield ""
    if inspection.parts:
        yield from _part_table(inspection)
        yield ""
    if len(inspection.files) > 1:
        files = [(_cell(file.name), str(file.nbytes), human_nbytes(file.nbytes)) for file in inspection.files]
        yield from _table(("file", "nbytes", ""), files, right={1, 2}, width=None)
        yield ""
    most = MAX_LINES if fold else None
    yield from _remarks(inspection)
    yield from _conversion(inspection, choice, most=most)
    metadata = [f"metadata {_cell(key)} = {_cell(value)}" for key, value in inspection.metadata.items()]
    yield from _cut(metadata, most, "texts of metadata")
    if inspection.metal is not None:
        yield inspection.metal


def _tensor_table(
    inspection: Inspection, choice: Choice, *, width: int | None, limit: int | None, folded: bool
) -> Iterator[str]:
    listed = fold(choice.rows) if folded else [Folded(row.name, (row,)) for row in choice.rows]
    names = {row.number: row.name for row in inspection.rows}
    in_set = len(inspection.files) > 1
    table = []
    for line in listed[:limit]:
        row = line.tensors[0]
        cells = [
            _cell(line.name),
            _cell(row.dtype),
            _cell(f"[{', '.join(map(str, row.shape))}]"),
            str(sum(tensor.nbytes for tensor in line.tensors)),
        ]
        cells += [_cell(_file_of(line.tensors))] if in_set else []
        single = len(line.tensors) == 1
        cells.append(str(row.file_offset) if single and row.file_offset is not None else "")
        cells.append(_flags(row, names) if single else _flags_of_many(line.tensors))
        table.append(cells)
    head = ["name", "dtype", "shape", "nbytes", *(["file"] if in_set else []), "file offset", ""]
    yield from _table(head, table, right={3, len(head) - 2}, width=width)
    if len(listed) > len(table):
        yield f"… {counted(len(listed) - len(table), 'row')} more"


def _file_of(tensors: Sequence[InspectedTensor]) -> str:
    files = {tensor.file for tensor in tensors if tensor.nbytes}
    if not files:
        return ""
    if None in files:
        return "several"
    return f"{len(files)} files" if len(files) > 1 else str(files.pop())


def _flags(row: InspectedTensor, names: Mapping[int, str]) -> str:
    """What is special about a tensor, in words."""
    words = []
    if row.shared_with is not None:
        words.append(f"tied with {_cell(names[row.shared_with])}")
    if row.inside is not None:
        words.append(f"in {_cell(names[row.inside])}")
    if row.page_aligned:
        words.append("page")
    if row.dim_order is not None:
        words.append(f"dim order {' '.join(map(str, row.dim_order))}")
    words += [_cell(f"{key} = {value}") for key, value in row.notes.items()]
    if row.fault is not None:
        words.append(f"FAULT: {row.fault}")
    return ", ".join(words)


def _flags_of_many(tensors: Sequence[InspectedTensor]) -> str:
    words = [f"{len(tensors)} x {tensors[0].nbytes}"]
    if all(tensor.page_aligned for tensor in tensors):
        words.append("page")
    common = dict(tensors[0].notes.items() & tensors[-1].notes.items())
    words += [_cell(f"{key} = {value}") for key, value in tensors[0].notes.items() if key in common]
    return ", ".join(words)


def _part_table(inspection: Inspection) -> Iterator[str]:
    total = sum(part.nbytes for part in inspection.parts)
    parts = [
        (name, str(nbytes), human_nbytes(nbytes), f"{100 * nbytes / total:.2f} %" if total else "")
        for name, nbytes in map(astuple, inspection.parts)
    ]
    what = "file" if len(inspection.files) < 2 else "all files"
    parts.append((what, str(total), human_nbytes(total), ""))
    yield from _table((f"what fills the {what[-5:]}", "nbytes", "", ""), parts, right={1, 2, 3}, width=None)


def _remarks(inspection: Inspection) -> Iterator[str]:
    """What follows the tables."""
    nbytes = inspection.tensors_nbytes
    shared = nbytes - sum(part.nbytes for part in inspection.parts if part.name in _TENSOR_PARTS)
    saved = f", {human_nbytes(shared)} of them shared" if shared > 0 and inspection.parts else ""
    yield f"{counted(len(inspection.rows), 'tensor')}, {nbytes} bytes ({human_nbytes(nbytes)}){saved}"
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


def _conversion(inspection: Inspection, choice: Choice, *, most: int | None) -> Iterator[str]:
    """What a conversion would make of a source."""
    if inspection.pack_nbytes is None and inspection.refusal is None:
        return
    yield f"{printable(inspection.kind)}; checksums: {inspection.checksums}"
    if inspection.pack_nbytes is not None:
        nbytes = inspection.pack_nbytes
        yield f"convert takes it: the pack has {nbytes} bytes ({human_nbytes(nbytes)})"
    elif not choice.refused:
        yield f"convert refuses it: {printable(inspection.refusal or '')}"
    refused = [f"convert refuses {_cell(one.name)}: {printable(one.reason)}" for one in choice.refused]
    yield from _cut(refused, most, "are refused")
    for warning in inspection.warnings:
        yield f"warning: {printable(warning)}"
    for remark in inspection.remarks:
        yield f"note: {printable(remark)}"


def _cut(texts: Sequence[str], most: int | None, what: str) -> Iterator[str]:
    yield from texts[:most]
    if most is not None and len(texts) > most:
        yield f"… {len(texts) - most} more {what}"


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
