"""The options of a conversion, with their defaults and checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from stream_pack.arguments.jobs import check_number
from stream_pack.arguments.paths import require_path
from stream_pack.errors import OptionError
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.header import To
from stream_pack.format.header_kinds import Front, plain_front
from stream_pack.format.layout import Policy
from stream_pack.pickles.nesting import Key
from stream_pack.pipeline.adapt.cast_rules import cast_rules
from stream_pack.pipeline.adapt.select import Order, Rename, Selection
from stream_pack.pipeline.adapt.source import Adaptation
from stream_pack.writer.flow import CHUNK_NBYTES, Progress, default_jobs
from stream_pack.writer.needs import Means
from stream_pack.writer.plan import PackSettings

__all__ = ["ConvertOptions", "Patterns", "Renames"]

Patterns: TypeAlias = "str | Iterable[str]"
Renames: TypeAlias = "str | Callable[[str], str] | Iterable[str | Callable[[str], str]]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvertOptions:
    """All arguments of :func:`stream_pack.convert` except source and target; they are explained there.

    ``front``, ``policy`` and ``adaptation`` are parsed from the options.

    Raises: OptionError for an option of the wrong type, or one that does not parse; LimitError for a number out of
    range.
    """

    to: To = "mps"
    key: Key = None
    ignore_unknown: bool = False
    include: Patterns | None = None
    exclude: Patterns | None = None
    rename: Renames | None = None
    dtype: object = None
    order: Order = "source"
    metadata: Mapping[str, str] | None = None
    alignment: Alignment = DEFAULT_ALIGNMENT
    block_nbytes: int = BLOCK_NBYTES
    allow_blowup: bool = False
    strict: bool = False
    jobs: int | None = None
    chunk_nbytes: int = CHUNK_NBYTES
    max_memory: int | None = None
    spool_dir: str | os.PathLike[str] | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] | None = None

    front: Front = field(init=False, repr=False)
    policy: Policy = field(init=False, repr=False)
    adaptation: Adaptation = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("jobs", self.jobs, least=1, optional=True)
        check_number("chunk_nbytes", self.chunk_nbytes, least=1)
        check_number("block_nbytes", self.block_nbytes)
        check_number("max_memory", self.max_memory, optional=True)
        if not isinstance(self.alignment, Alignment):
            raise _wrong("alignment", self.alignment, "stream_pack.Alignment(small=..., large=...)")
        _check_metadata(self.metadata)
        for name in ("allow_blowup", "ignore_unknown", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if self.spool_dir is not None:
            require_path("spool_dir", self.spool_dir, "folder")
        for name, function in (("progress", self.progress), ("announce", self.announce)):
            if function is not None and not callable(function):
                raise _wrong(name, function, "a function")
        policy = Policy(alignment=self.alignment, block_nbytes=self.block_nbytes, allow_blowup=self.allow_blowup)
        selection = Selection(
            include=_patterns("include", self.include),
            exclude=_patterns("exclude", self.exclude),
            renames=_renames(self.rename),
            order=self.order,
        )
        object.__setattr__(self, "front", plain_front(self.to))
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "adaptation", Adaptation(selection, cast_rules(self.dtype)))

    @property
    def settings(self) -> PackSettings:
        """What the writer has to know of all this."""
        return PackSettings(
            front=self.front,
            policy=self.policy,
            metadata=self.metadata or {},
            strict=self.strict,
            means=Means(self.chunk_nbytes, self.jobs or default_jobs(), self.max_memory),
        )


def _wrong(name: str, value: object, expected: str) -> OptionError:
    shown = repr(value)
    return OptionError(f"{name}={shown[:200]}{'...' if shown[200:] else ''}: expected {expected}")


def _check_metadata(metadata: object) -> None:
    if metadata is not None and not (
        isinstance(metadata, Mapping) and all(isinstance(text, str) for pair in metadata.items() for text in pair)
    ):
        raise _wrong("metadata", metadata, "a mapping of strings to strings")


def _patterns(option: str, given: object) -> tuple[str, ...]:
    patterns = _several(given)
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise _wrong(option, given, "a glob or an iterable of globs")
    return cast("tuple[str, ...]", patterns)


def _renames(given: object) -> tuple[Callable[[str], str], ...]:
    renames = (given,) if callable(given) else _several(given)
    if renames is None or not all(isinstance(item, str) or callable(item) for item in renames):
        expected = "'s/REGEX/REPLACEMENT/', a function from name to name, or several"
        raise _wrong("rename", given, expected)
    return tuple(
        Rename.parse(item) if isinstance(item, str) else cast("Callable[[str], str]", item) for item in renames
    )


def _several(given: object) -> tuple[object, ...] | None:
    """The items of ``given``: nothing, one text, or those of an iterable; None if it is something else."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
        return None
    return tuple(given)
