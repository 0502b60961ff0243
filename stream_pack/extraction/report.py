"""What an extraction has done, or would do."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from stream_pack.text import counted, human_nbytes

__all__ = ["ExtractForecast", "ExtractReport", "ExtractedFile"]


@dataclass(frozen=True, slots=True)
class ExtractedFile:
    """One file: its name in the target folder, or the target as it was given (``"-"`` for a stream), and its length."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extraction:
    """What both have."""

    source_kind: str
    to: str
    tensors: int
    nbytes: int
    files: tuple[ExtractedFile, ...]
    copied: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    spool_nbytes: int
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractReport(_Extraction):
    """What :func:`stream_pack.extract` has done.

    ``to`` is the format; ``files`` are those with tensors, ``copied`` those that stood beside the source; ``dropped``
    names the tensors that were left out because another has the same bytes.  ``verification``: which of the source's
    own checksums were verified.

    Units: bytes.  ``nbytes``: of all files with tensors; ``spool_nbytes``: peak of temporary disk space.
    """

    seconds: float
    verification: str

    def summary(self) -> str:
        """One line of text."""
        rate = human_nbytes(self.nbytes / self.seconds) if self.seconds else "-"
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        dropped = f", {counted(len(self.dropped), 'tied tensor')} dropped" if self.dropped else ""
        spool = f", {human_nbytes(self.spool_nbytes)} spooled" if self.spool_nbytes else ""
        return (
            f"{counted(self.tensors, 'tensor')}{dropped}, {human_nbytes(self.nbytes)} of {self.to}{files}{spool}, "
            f"{self.seconds:.2f} s, {rate}/s, {self.source_kind}: {self.verification}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractForecast(_Extraction):
    """What :func:`stream_pack.extract` would do; fields as in :class:`ExtractReport`.

    ``peak_memory_nbytes``: an upper bound of the process's own memory.
    """

    peak_memory_nbytes: int

    def to_text(self) -> str:
        """A table of the files, and what writing them needs."""
        rows = [(file.name, file.nbytes) for file in self.files]
        rows += [("temporary disk space", self.spool_nbytes), ("peak memory, at most", self.peak_memory_nbytes)]
        digits = max(len(str(nbytes)) for _, nbytes in rows)
        width = max(len(name) for name, _ in rows)
        lines = [f"{counted(self.tensors, 'tensor')} as {self.to}, from {self.source_kind}"]
        lines += [f"{name:<{width}}  {nbytes:>{digits}}  {human_nbytes(nbytes)}" for name, nbytes in rows]
        return "\n".join(lines)
