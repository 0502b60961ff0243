"""What verifying found."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stream_pack.errors import ChecksumError, FormatError, ReadError

__all__ = ["Damage", "VerifyReport", "hiding_the_rest"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference from what was written, or from what the format allows.

    ``part``: ``"head"``, ``"length"``, ``"graph"``, ``"names"``, ``"notes"``, ``"buffers"``, ``"padding"``,
    ``"block"``, ``"checksums"`` or ``"footer"``; in files that ExecuTorch wrote also ``"constant"``, ``"range"``,
    ``"segment"`` and ``"data"`` (which have another SHA-256 than their name).  ``tensors`` are those affected, as far
    as that is known.
    ``buffer``, ``block`` (its number in the buffer) and ``tensor_count`` are given for a block, whose ``tensors`` are
    100 at most of that many.  ``error`` is what :meth:`VerifyReport.raise_if_damaged` raises; a ReadError where the
    system could not read the bytes.

    Units: bytes; the half-open range ``[file_begin, file_end)`` counts from the pack's first byte.
    """

    part: str
    file_begin: int
    file_end: int
    error: FormatError | ChecksumError | ReadError
    tensors: tuple[str, ...] = ()
    tensor_count: int | None = None
    buffer: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        # A traceback would keep the file mapped as long as the report.
        self.error.__context__ = None
        self.error.with_traceback(None)

    @property
    def message(self) -> str:
        """What is wrong, where, and which tensors it affects."""
        return str(self.error)

    @property
    def unreadable(self) -> bool:
        """Whether the bytes could not be read at all: a fault of the disk or the network, not of what was written."""
        return isinstance(self.error, ReadError)

    def to_json(self) -> dict[str, object]:
        """All fields, the error as its message; checksums as 16 hex digits, or 64 of a SHA-256."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        error = plain.pop("error")
        if isinstance(error, ChecksumError):
            digits = 64 if error.part == "data" else 16
            plain |= {"expected": f"{error.expected:0{digits}x}", "actual": f"{error.actual:0{digits}x}"}
        return {**plain, "unreadable": self.unreadable, "message": self.message, "tensors": list(self.tensors)}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was verified, and all damage found, in file order.

    ``path``: the file, as it was given.  ``blocks`` and ``nbytes`` are the blocks whose checksums were recomputed, and
    their bytes.  ``complete`` is False when part of the file could not be verified: the damage hides where it is, or it
    cannot be read.  ``checksum``: the root checksum, where it was proved; None for a file that is no pack.
    ``unverified`` and ``unverified_nbytes``: constants of a file that ExecuTorch wrote which have nothing that they
    could be verified against, and their bytes.
    """

    tensors: int
    blocks: int
    nbytes: int
    complete: bool
    damages: tuple[Damage, ...]
    path: str = ""
    checksum: int | None = None
    seconds: float = 0.0
    unverified: int = 0
    unverified_nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages

    def raise_if_damaged(self) -> None:
        """Raise the error of the first damage, if there is one."""
        if self.damages:
            raise self.damages[0].error

    def to_json(self) -> dict[str, object]:
        """All fields, the checksum as 16 hex digits."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        checksum = None if self.checksum is None else f"{self.checksum:016x}"
        damages = [damage.to_json() for damage in self.damages]
        return {"ok": self.ok, **plain, "checksum": checksum, "damages": damages}


def hiding_the_rest(damage: Damage, *, tensors: int = 0) -> VerifyReport:
    """The report of damage that hides where everything else is."""
    return VerifyReport(tensors=tensors, blocks=0, nbytes=0, complete=False, damages=(damage,))
