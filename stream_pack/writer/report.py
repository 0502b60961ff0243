"""What a conversion does, as numbers: what it has done, and what it would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from stream_pack.text import counted, human_nbytes

__all__ = ["Forecast", "Report", "Sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is packed, and why a pack has another length than its source.

    ``target_nbytes == source_nbytes - unused_nbytes + repeated_nbytes + cast_nbytes + padding_nbytes +
    overhead_nbytes``.

    Units: bytes.  ``source_nbytes``: all tensor storages of the source.  ``unused_nbytes``: the bytes of these that no
    tensor uses.  ``repeated_nbytes``: bytes stored more than once (overlapping views, expanded tensors).
    ``cast_nbytes``: what casts add; negative if they shrink the tensors.  ``casts``: the number of tensors by
    ``"float32 -> bfloat16"``.  ``padding_nbytes``: zeros between tensors.  ``overhead_nbytes``: head, checksums and
    footer.  ``shared_nbytes``: what the ``tied`` tensors would take without sharing.

    ``warnings``: what the pack may lack, or what had no effect, a line each.  ``remarks``: how the source was read,
    which is nothing to worry about: what was chosen without being asked, what was left out because it was to be.
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
    cast_nbytes: int = 0
    casts: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Sizes):
    """What a conversion has done.

    ``spool_nbytes``: peak of temporary disk space.  ``checksum``: the pack's root checksum.  ``verification``: which
    of the source's own checksums were verified.
    """

    spool_nbytes: int
    seconds: float
    checksum: int
    verification: str

    def summary(self) -> str:
        """One line of text."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Sizes):
    """What a conversion would do.

    ``buffers``: the number of byte ranges in the pack; tensors that share bytes share one.  ``spool_nbytes``: temporary
    disk space.  ``peak_memory_nbytes``: an upper bound of the process's own memory.
    """

    buffers: int
    spool_nbytes: int
    peak_memory_nbytes: int

    def to_text(self) -> str:
        """A table: how the length of the pack follows from that of the source, and what the conversion needs."""
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
        lines = [f"{counted(self.tensors, 'tensor')} ({self.tied} tied or views) in {counted(self.buffers, 'buffer')}"]
        lines += [f"cast {kind}: {counted(count, 'tensor')}" for kind, count in self.casts.items()]
        lines += [f"{what:<32}{nbytes:>{digits}}  {human_nbytes(nbytes)}" for what, nbytes in rows]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)
