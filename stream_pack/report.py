"""What a conversion did, as numbers and as the one line that it ends with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Report", "human_nbytes"]


def human_nbytes(nbytes: float) -> str:
    """Bytes in IEC units, three digits: ``"1.50 GiB"``."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = "B"
    while abs(nbytes) >= 1024:
        nbytes, unit = nbytes / 1024, next(units)
    digits = 2 if abs(nbytes) < 10 else 1 if abs(nbytes) < 100 else 0
    return f"{nbytes:.{digits}f} {unit}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and why it has another length than what was read.

    ``target_nbytes == source_nbytes - unused_nbytes + repeated_nbytes + padding_nbytes +
    overhead_nbytes``.

    Units: bytes.  ``source_nbytes``: all tensor storages of the source.  ``unused_nbytes``: those
    of them that no tensor uses.
    ``repeated_nbytes``: stored more than once (overlapping views apart, expanded tensors written
    out).
    ``padding_nbytes``: zeros in the region.  ``overhead_nbytes``: head, checksums and footer.
    ``shared_nbytes``: what the ``tied`` tensors would have taken by themselves.  ``spool_nbytes``:
    peak of temporary disk space.
    ``checksum``: the pack's root checksum.  ``verification``: what of the source's own checksums
    was verified.
    """

    source_kind: str
    tensors: int
    tied: int
    source_nbytes: int
    target_nbytes: int
    shared_nbytes: int
    unused_nbytes: int
    repeated_nbytes: int
    padding_nbytes: int
    overhead_nbytes: int
    spool_nbytes: int
    seconds: float
    checksum: int
    verification: str
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for a person."""
        why = [
            f"{human_nbytes(nbytes)} {what}"
            for nbytes, what in (
                (self.unused_nbytes, "unused dropped"),
                (self.repeated_nbytes, "stored twice"),
                (self.padding_nbytes, "padding"),
                (self.overhead_nbytes, "index and checksums"),
            )
            if nbytes
        ]
        if self.tied:
            why.insert(0, f"{self.tied} tied")
        spool = f", {human_nbytes(self.spool_nbytes)} spooled" if self.spool_nbytes else ""
        rate = human_nbytes(self.target_nbytes / self.seconds) if self.seconds else "-"
        plural = "tensor" if self.tensors == 1 else "tensors"
        return (
            f"{self.tensors} {plural}, {human_nbytes(self.source_nbytes)} in, {human_nbytes(self.target_nbytes)} out "
            f"({', '.join(why)}){spool}, {self.seconds:.2f} s, {rate}/s, root {self.checksum:016x}, "
            f"{self.source_kind}: {self.verification}"
        )

    def to_json(self) -> dict[str, object]:
        """All fields, the checksum as 16 hex digits."""
        return {**asdict(self), "checksum": f"{self.checksum:016x}"}
