"""The result of an inspection: tensors, parts of the file, payloads, and what a conversion would make of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Literal, TypeAlias

__all__ = [
    "SCHEMA",
    "InspectedFile",
    "InspectedPart",
    "InspectedPayload",
    "InspectedTensor",
    "Inspection",
    "RefusedTensor",
    "Sort",
]

Sort: TypeAlias = Literal["size", "name", "offset"]
"""The order of a list of tensors: the largest first; by name; as they lie in the file."""

SCHEMA = 1
"""The version of what :meth:`Inspection.to_json` returns: raised when a field changes its meaning or goes."""


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """One tensor.

    ``number``: its place in :attr:`Inspection.rows`, from 0.  ``shared_with`` is that of a tensor with exactly the
    same bytes, ``inside`` that of one whose bytes contain these; both are usually None; numbers, so that a long name is
    not repeated.  ``buffer`` is the number of the buffer with its bytes, of a source that of the storage; None for a
    tensor of 0 bytes.

    ``file``: of a set of files, the one that holds the bytes; None where several do, and of a source that is no set.
    ``file_offset``: where the bytes begin; None where they are in no regular file as they are: they come from a pipe,
    or are compressed, strided, or put together from parts.

    ``page_aligned``: of a pack, it starts at a multiple of 16,384, so that it can have its own MTLBuffer.
    ``dim_order``, of a tensor of ExecuTorch's that is not row-major, lists its dims as they follow in memory.
    ``quantization``: the type of GGUF's or XNNPACK's that the bytes are of, else None.  ``notes`` are the texts
    attached to it.

    Units: bytes; ``file_offset`` counts from the pack's first byte, of a source from the file's.
    """

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str | None
    file_offset: int | None
    buffer: int | None
    shared_with: int | None
    inside: int | None
    page_aligned: bool
    fault: str | None
    dim_order: tuple[int, ...] | None
    quantization: str | None
    notes: dict[str, str]


@dataclass(frozen=True, slots=True)
class RefusedTensor:
    """What :func:`stream_pack.convert` refuses unless it is left out.

    ``name``: in the source.  ``error``: the class of the exception; ``reason``: its message, which says what to do.
    """

    name: str
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class InspectedPart:
    """A part of the file, or of all files of a set.  Parts of the same kind are added up."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """A file that holds tensors: its name without the folder, and its length in bytes."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What :func:`stream_pack.inspect` says of a pack, a file that ExecuTorch wrote, or whatever can be converted.

    ``path``: empty for what has none.  ``kind``: ``"pack"``; ``"mps"``, ``"xnnpack"``, ``"ptd"`` or ``"pte"``, a file
    of ExecuTorch's; else a source, as the report of :func:`stream_pack.convert` calls it: ``"torch zip"``,
    ``"safetensors"``, ``"Hugging Face set of 2 files"`` ...

    ``nbytes`` is the length of the pack or file, of a set that of the files which hold tensors; None where it cannot be
    known yet.  The nbytes of all ``parts`` add up to exactly that; there are none where not every tensor has a place in
    a file.  ``tensors_nbytes`` counts every tensor as if it shared no bytes, so it exceeds the part "tensors" (of a
    program: "payload constants", "named data" and "program constants") by what sharing saves.
    ``checksums``: which ones the file carries, ``"none"`` if it has none.

    Of a pack only: ``alignment`` (of small and large tensors) and ``block_nbytes``; ``head``, whose header it begins
    with: ``"mps"``, ``"xnnpack"`` or ``"ptd"``; ``checksum``, the root checksum (see :attr:`Pack.checksum`), None where
    the pack comes through a pipe; ``metal``, how a Mac will use it, in a line.

    Of ExecuTorch's files only: ``payloads`` of a program; ``external``, how many constants are in other files;
    ``faults``, what is wrong.

    Of a source only: ``files``; ``refused``, what cannot be packed, which is not in ``rows``; ``pack_nbytes``, the
    length of the pack that :func:`stream_pack.convert` makes with its defaults, or ``refusal``, why it makes none;
    ``warnings`` and ``remarks``, as in its report.

    Units: bytes.
    """

    path: str
    kind: str
    nbytes: int | None
    tensors_nbytes: int
    metadata: dict[str, str]
    checksums: str
    rows: tuple[InspectedTensor, ...]
    parts: tuple[InspectedPart, ...]
    alignment: tuple[int, int] | None = None
    block_nbytes: int | None = None
    head: str | None = None
    checksum: int | None = None
    metal: str | None = None
    payloads: tuple[InspectedPayload, ...] = ()
    external: int = 0
    faults: tuple[str, ...] = ()
    files: tuple[InspectedFile, ...] = ()
    refused: tuple[RefusedTensor, ...] = ()
    refusal: str | None = None
    pack_nbytes: int | None = None
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def to_json(
        self, *, include: str | Iterable[str] = (), sort: Sort | None = None, limit: int | None = None
    ) -> dict[str, object]:
        """All fields, as values that the json module takes, the checksum as 16 hex digits; ``schema``, their version;
        ``tensors``, how many there are in all.  docs/json.md explains each.

        ``include``: globs over whole names, of which one must match; ``limit``: so many rows at most.

        Raises: SourceError when ``include`` leaves nothing; OptionError.
        """
        from stream_pack.inspection.choice import choose

        chosen = choose(self, include=include, sort=sort)
        return {
            "schema": SCHEMA,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "tensors": len(self.rows),
            "rows": [{name: getattr(row, name) for name in row.__slots__} for row in chosen.rows[:limit]],
            "parts": [asdict(part) for part in self.parts],
            "payloads": [asdict(payload) for payload in self.payloads],
            "files": [asdict(file) for file in self.files],
            "refused": [asdict(refused) for refused in chosen.refused],
            "checksum": None if self.checksum is None else f"{self.checksum:016x}",
        }

    def to_text(
        self,
        width: int | None = None,
        *,
        include: str | Iterable[str] = (),
        sort: Sort | None = None,
        limit: int | None = None,
        fold: bool = False,
    ) -> str:
        """Tables; names are cut to fit ``width`` columns, and to 120 characters in any case.

        ``fold``: tensors whose names differ in a number only, and which are alike otherwise, share a row:
        ``layers.{0..31}.wq``.  ``limit``: so many rows at most.  The rest: as for :meth:`to_json`.
        """
        from stream_pack.inspection.choice import choose
        from stream_pack.inspection.text import lines

        return "\n".join(lines(self, choose(self, include=include, sort=sort), width=width, limit=limit, fold=fold))
