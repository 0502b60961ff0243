"""The options of an extraction, with their defaults and checks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from stream_pack.arguments.jobs import check_number
from stream_pack.errors import OptionError
from stream_pack.text import listed, quoted, shown
from stream_pack.writer.options import ConvertOptions

__all__ = ["ExtractOptions", "Format", "Tied", "several"]

Format: TypeAlias = Literal["safetensors", "torch", "npy", "npz", "raw"]
Tied: TypeAlias = Literal["duplicate", "drop"]

SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
    ".npy": "npy",
    ".npz": "npz",
}
"""What a target's name says of its format."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtractOptions:
    """All arguments of :func:`stream_pack.extract` except source and target; they are explained there.

    ``common``: those that :func:`stream_pack.convert` has, too.
    Raises: OptionError.
    """

    to: Format | None
    names: tuple[str, ...]
    tied: Tied
    max_shard_nbytes: int | None
    common: ConvertOptions

    def __post_init__(self) -> None:
        if self.to not in (None, *get_args(Format)):
            raise OptionError(f"to={shown(self.to)}: expected {listed(get_args(Format))} or None")
        if self.tied not in get_args(Tied):
            raise OptionError(f"tied={shown(self.tied)}: expected 'duplicate' or 'drop'")
        check_number("max_shard_nbytes", self.max_shard_nbytes, least=1, optional=True)

    def into_folder(self, target: object) -> bool:
        """Whether ``target`` is a folder: because it is there, is written as one, or is to have several files."""
        if not isinstance(target, (str, os.PathLike)):
            if self.max_shard_nbytes is not None:
                raise OptionError(
                    "max_shard_nbytes (--max-shard-size) makes several files: the target must be a folder"
                )
            return False
        path = os.fsdecode(target)
        return self.max_shard_nbytes is not None or path.endswith("/") or os.path.isdir(path)

    def format_of(self, target: object) -> Format:
        """The format: the one that is given, or that the name of ``target`` says.

        Raises: OptionError where neither says it, or a folder is to have another than safetensors.
        """
        if self.into_folder(target):
            if self.to not in (None, "safetensors"):
                raise OptionError(f"to={quoted(self.to)} is one file: a folder can be written as safetensors only")
            return "safetensors"
        if self.to is not None:
            return self.to
        suffix = os.path.splitext(os.fsdecode(target))[1] if isinstance(target, (str, os.PathLike)) else ""
        if suffix not in SUFFIXES:
            raise OptionError(
                "the format is not known from the target's name: choose one with --to (to=), "
                f"{listed(get_args(Format), show=str)}, or let the name end in "
                f"{listed(SUFFIXES, show=str, most=len(SUFFIXES))}"
            )
        return SUFFIXES[suffix]


def several(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """``names`` as a tuple.  Raises: OptionError for anything but text."""
    found = (names,) if isinstance(names, str) else tuple(names or ())
    if not all(isinstance(name, str) for name in found):
        raise OptionError(f"names={shown(names)}: expected a name, or an iterable of names")
    return found
