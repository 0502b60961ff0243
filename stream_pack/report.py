"""What a conversion did, as numbers and as the one line that it ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from stream_pack.text import counted, human_nbytes

__all__ = ["Forecast", "Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and why it has another length than what was read.

    ``target_nbytes == source_nbytes - unused_nbytes + repeated_nbytes + cast_nbytes + padding_nbytes
    + overhead_nbytes``.

    Units: bytes.  ``source_nbytes``: all tensor storages of the source.  ``unused_nbytes``: those
    of them that no tensor uses.
    ``repeated_nbytes``: stored more than once (overlapping views apart, expanded tensors written
    out).
    ``cast_nbytes``: what casts add; below 0, what they take off.  ``casts``: how many tensors, by
    ``"float32 -> bfloat16"``.
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
    cast_nbytes: int = 0
    casts: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for a person."""
        why = [
            f"{human_nbytes(nbytes)} {what}"
            for nbytes, what in (
                (self.unused_nbytes, "unused dropped"),
                (self.repeated_nbytes, "stored twice"),
                (-self.cast_nbytes, "less by casts"),
                (self.cast_nbytes, "more by casts"),
                (self.padding_nbytes, "padding"),
                (self.overhead_nbytes, "index and checksums"),
            )
            if nbytes > 0
        ]
        if self.tied:
            why.insert(0, f"{self.tied} tied")
        casts = "".join(f", {count} {kind}" for kind, count in self.casts.items())
        spool = f", {human_nbytes(self.spool_nbytes)} spooled" if self.spool_nbytes else ""
        rate = human_nbytes(self.target_nbytes / self.seconds) if self.seconds else "-"
        return (
            f"{counted(self.tensors, 'tensor')}, {human_nbytes(self.source_nbytes)} in, "
            f"{human_nbytes(self.target_nbytes)} out ({', '.join(why)}){casts}{spool}, "
            f"{self.seconds:.2f} s, {rate}/s, root {self.checksum:016x}, {self.source_kind}: {self.verification}"
        )

    def to_json(self) -> dict[str, object]:
        """All fields, the checksum as 16 hex digits."""
        return {**asdict(self), "checksum": f"{self.checksum:016x}"}


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a conversion would do: its plan, of which nothing has been carried out.

    Fields and units as in :class:`Report`.  ``buffers``: how many ranges of bytes the pack would have, shared ones
    counted once.  ``spool_nbytes``: temporary disk space.  ``peak_memory_nbytes``: the most memory of its own that the
    process would have (an upper bound).
    """

    source_kind: str
    tensors: int
    tied: int
    buffers: int
    source_nbytes: int
    target_nbytes: int
    shared_nbytes: int
    unused_nbytes: int
    repeated_nbytes: int
    padding_nbytes: int
    overhead_nbytes: int
    cast_nbytes: int
    casts: Mapping[str, int]
    spool_nbytes: int
    peak_memory_nbytes: int
    warnings: tuple[str, ...]

    def to_text(self) -> str:
        """A table for a person: the way from the source's length to the pack's, and what it takes."""
        rows = [
            (f"source ({self.source_kind})", self.source_nbytes),
            ("- unused, dropped", -self.unused_nbytes),
            ("+ stored twice", self.repeated_nbytes),
            ("+ casts", self.cast_nbytes),
            ("+ padding", self.padding_nbytes),
            ("+ index and checksums", self.overhead_nbytes),
            ("= pack", self.target_nbytes),
            ("saved by sharing", self.shared_nbytes),
            ("temporary disk space", self.spool_nbytes),
            ("peak memory, at most", self.peak_memory_nbytes),
        ]
        digits = max(len(str(nbytes)) for _, nbytes in rows)
        lines = [
            f"{counted(self.tensors, 'tensor')}, {self.tied} of them tied or views, in {self.buffers} buffers"
        ]
        lines += [f"cast {kind}: {counted(count, 'tensor')}" for kind, count in self.casts.items()]
        lines += [f"{what:<32}{nbytes:>{digits}}  {human_nbytes(nbytes)}" for what, nbytes in rows]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)
