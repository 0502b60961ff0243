"""An inspection as one page of HTML that needs nothing else: no server, no network, no other file.

What is short is plain HTML; the tensors are columns of JSON, from which the page's own script draws pictures and lists
the rows that can be seen, so that 100,000 cost little more than ten.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

import numpy as np

from stream_pack.inspection.inspection import InspectedTensor, Inspection
from stream_pack.reader.damage import Damage
from stream_pack.text import counted, human_nbytes, printable

__all__ = ["page"]

MOST = 200
"""Items of a list in the plain part of the page; of tensors there is the table."""

MOST_CHARACTERS = 500
"""Of a text in the plain part: metadata may be megabytes."""

AFTER_REGION = ("checksums", "footer")
OF_TENSORS = ("block", "constant", "data")
"""Parts that damage is in, as :class:`Damage` calls them, which are bytes of tensors."""

SIZES = ((1 << 10, "below 1 KiB"), (1 << 20, "below 1 MiB"), (1 << 24, "below 16 MiB"), (1 << 28, "below 256 MiB"))


def page(inspection: Inspection, damages: Sequence[Damage] | None = None) -> bytes:
    """The page.  ``damages``: what verifying the file found; None if it was not verified."""
    name = re.split(r"[/\\]", inspection.path)[-1] or inspection.kind
    filled = {
        "title": _text("stdin" if name == "-" else name),
        "facts": _facts(inspection, damages),
        "lists": "\n".join(_lists(inspection, damages or ())),
        "drawn": "The files" if len(inspection.files) > 1 else "The file",
        "totals": "\n".join(_totals(inspection)),
        "ties": _ties(inspection.rows),
        "data": _embedded(_data(inspection, damages or ())),
    }
    template = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    # In one pass: what was filled in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], template).encode()


def _text(text: str) -> str:
    """``text`` as HTML, on one line and cut."""
    return escape(printable(text[:MOST_CHARACTERS]) + ("…" if len(text) > MOST_CHARACTERS else ""))


def _embedded(value: object) -> str:
    """JSON that is safe inside a script element: ASCII alone, and nothing in it can begin or end a tag."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _facts(inspection: Inspection, damages: Sequence[Damage] | None) -> str:
    facts: list[tuple[str, str]] = [("path", inspection.path), ("kind", inspection.kind)]
    if inspection.nbytes is not None:
        facts.append(("length", _nbytes(inspection.nbytes)))
    facts.append(("tensors", f"{len(inspection.rows)}, {_nbytes(inspection.tensors_nbytes)}"))
    facts.append(("checksums", inspection.checksums))
    if inspection.checksum is not None:
        facts.append(("root checksum", f"{inspection.checksum:016x}"))
    if damages is not None:
        facts.append(("verified", f"damage in {counted(len(damages), 'place')}" if damages else "no damage"))
    if inspection.alignment is not None:
        small, large = inspection.alignment
        facts.append(("alignment", f"{small} bytes, of large tensors {large}"))
    if inspection.metal is not None:
        facts.append(("on a Mac", inspection.metal))
    if inspection.pack_nbytes is not None:
        facts.append(("convert takes it", f"the pack has {_nbytes(inspection.pack_nbytes)}"))
    elif inspection.refusal is not None:
        facts.append(("convert refuses it", inspection.refusal))
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(fact)}</dd>" for name, fact in facts if fact)
    return f"<dl>{items}</dl>"


def _lists(inspection: Inspection, damages: Sequence[Damage]) -> Iterator[str]:
    yield from _list("Damage", [damage.message for damage in damages], bad=True)
    yield from _list("Faults", inspection.faults, bad=True)
    yield from _list("Refused by convert", [f"{one.name}: {one.reason}" for one in inspection.refused], bad=True)
    yield from _list("Warnings", inspection.warnings)
    yield from _list("Notes", inspection.remarks)
    metadata = [f"{key} = {value}" for key, value in inspection.metadata.items()]
    if metadata:
        yield f"<details><summary>{counted(len(metadata), 'text')} of metadata</summary>"
        yield from _list("", metadata)
        yield "</details>"


def _list(title: str, texts: Sequence[str], *, bad: bool = False) -> Iterator[str]:
    if not texts:
        return
    if title:
        yield f"<h2{' class=bad' if bad else ''}>{title}</h2>"
    items = [f"<li>{_text(text)}</li>" for text in texts[:MOST]]
    if len(texts) > MOST:
        items.append(f"<li>and {len(texts) - MOST} more</li>")
    yield f"<ul>{''.join(items)}</ul>"


def _totals(inspection: Inspection) -> Iterator[str]:
    """Tables: parts of the file, dtypes, lengths of tensors."""
    total = sum(part.nbytes for part in inspection.parts)
    parts = [(part.name, _nbytes(part.nbytes), _share(part.nbytes, total)) for part in inspection.parts]
    yield from _table("part of the file", ("bytes", "share"), parts)
    for title, names in (
        ("dtype", [_dtype(row) for row in inspection.rows]),
        ("length of a tensor", [_size(row.nbytes) for row in inspection.rows]),
    ):
        number, nbytes = Counter(names), Counter[str]()
        for name, row in zip(names, inspection.rows):
            nbytes[name] += row.nbytes
        rows = [
            (name, str(number[name]), _nbytes(length), _share(length, inspection.tensors_nbytes))
            for name, length in nbytes.most_common(MOST)
        ]
        yield from _table(title, ("tensors", "bytes", "share"), rows)


def _size(nbytes: int) -> str:
    return next((text for limit, text in SIZES if nbytes < limit), "256 MiB or more")


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    others = "".join(f"<th class=n>{head}</th>" for head in heads)
    yield f"<table><thead><tr><th>{title}</th>{others}</tr></thead><tbody>"
    for name, *cells in rows:
        yield f"<tr><td>{_text(name)}</td>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>"
    yield "</tbody></table>"


def _ties(rows: Sequence[InspectedTensor]) -> str:
    """Tensors with the same bytes, each with the first of them."""
    texts = []
    for row in rows:
        if row.inside is not None:
            texts.append(f"{row.name} is inside {rows[row.inside].name}")
        elif row.shared_with is not None and row.shared_with < row.number:
            texts.append(f"{row.name} is {rows[row.shared_with].name}")
    return "\n".join(_list("Ties", texts))


def _nbytes(nbytes: int) -> str:
    return f"{nbytes} bytes ({human_nbytes(nbytes)})" if nbytes >= 1024 else f"{nbytes} bytes"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else ""


def _data(inspection: Inspection, damages: Sequence[Damage]) -> dict[str, object]:
    """What the page's script reads: columns, with -1 for nothing.

    ``files``: name and length of each; ``parts``: name, begin and end of what is in a pack beside tensors and padding.
    """
    rows = inspection.rows
    dtypes, shapes = _Texts(), _Texts()
    files = [(file.name, file.nbytes) for file in inspection.files] or [("", inspection.nbytes or 0)]
    numbers: dict[str | None, int] = {None: 0}
    if len(files) > 1:
        numbers = {name: number for number, (name, _) in enumerate(files)}
    return {
        "names": [row.name for row in rows],
        "dtype": [dtypes[_dtype(row)] for row in rows],
        "dtypes": dtypes.texts,
        "shape": [shapes[f"[{', '.join(map(str, row.shape))}]"] for row in rows],
        "shapes": shapes.texts,
        "nbytes": [row.nbytes for row in rows],
        "file": [numbers.get(row.file, -1) for row in rows],
        "files": files,
        "offset": _numbers(row.file_offset for row in rows),
        "tied": _numbers(row.shared_with for row in rows),
        "inside": _numbers(row.inside for row in rows),
        "notes": dict(_notes(rows)),
        "parts": list(_placed_parts(inspection)),
        "damages": [(damage.file_begin, damage.file_end) for damage in damages],
        "damaged": _damaged(rows, damages),
    }


def _dtype(row: InspectedTensor) -> str:
    return row.dtype if row.quantization is None else row.quantization


def _numbers(column: Iterable[int | None]) -> list[int]:
    return [-1 if number is None else number for number in column]


class _Texts:
    """Texts, numbered as they are first met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def _notes(rows: Iterable[InspectedTensor]) -> Iterator[tuple[int, str]]:
    """What else is special about a tensor."""
    for row in rows:
        words = [f"{key} = {value}"[:MOST_CHARACTERS] for key, value in row.notes.items()]
        words += ["page"] if row.page_aligned else []
        words += [] if row.fault is None else [f"FAULT: {row.fault}"]
        if words:
            yield row.number, ", ".join(words)


def _placed_parts(inspection: Inspection) -> Iterator[tuple[str, int, int]]:
    """Where the head and the tail of a pack are: the parts before its region follow each other, as do those after."""
    if inspection.kind != "pack" or inspection.nbytes is None:
        return
    position = 0
    for part in inspection.parts:
        if part.name == "tensors":
            break
        yield part.name, position, position + part.nbytes
        position += part.nbytes
    tail = [part for part in inspection.parts if part.name in AFTER_REGION]
    position = inspection.nbytes - sum(part.nbytes for part in tail)
    for part in tail:
        yield part.name, position, position + part.nbytes
        position += part.nbytes


def _damaged(rows: Sequence[InspectedTensor], damages: Sequence[Damage]) -> list[int]:
    """The numbers of the tensors that damage is in: that it names, or that have bytes where it is."""
    named = {name for damage in damages for name in damage.tensors}
    marked = np.array([row.name in named for row in rows], bool)
    begins = np.array(_numbers(row.file_offset for row in rows), np.int64)
    lengths = np.array([row.nbytes for row in rows], np.int64)
    for damage in damages:  # one names a hundred tensors at most
        if damage.part in OF_TENSORS:
            marked |= (
                (begins >= 0) & (begins < damage.file_end) & (damage.file_begin < begins + lengths) & (lengths > 0)
            )
    numbers: list[int] = np.flatnonzero(marked).tolist()
    return numbers
