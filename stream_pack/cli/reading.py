"""What the commands that read a checkpoint share: its arguments, and the options of the library that they are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import STANDARD, add_flag, add_jobs, add_option, nbytes
from stream_pack.cli.exits import UsageError
from stream_pack.cli.progress import Progress
from stream_pack.cli.terminal import Standard, note
from stream_pack.errors import LimitError
from stream_pack.text import quoted

if TYPE_CHECKING:
    from stream_pack.sources.open import FileAt
    from stream_pack.writer.options import ConvertOptions

__all__ = ["Told", "add_keys", "add_selection", "add_streaming", "convert_options", "key_of", "note_all", "source_of"]


class Told(Protocol):
    """A report or forecast."""

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def remarks(self) -> tuple[str, ...]: ...


def add_keys(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which part of a training checkpoint is taken; the group, for what else belongs to it."""
    group = parser.add_argument_group(
        "training checkpoints",
        "A flat state dict is used as is. In a nested checkpoint, the dict under state_dict, model or "
        "model_state_dict is used if exactly one of these keys holds tensors; otherwise --key must choose one.",
    )
    text = "use what is under this key; a.b, or --key a --key b, means b inside a; . means everything; the items of "
    text += "lists, and keys that are numbers, are given as numbers: optimizer.state.0"
    add_option(group, "--key", "KEY", text, repeated=True)
    text = "skip objects that need code to load, and all they contain, instead of failing"
    add_flag(group, "--ignore-unknown", text=text)
    return group


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Which tensors are taken, under which names, as which dtypes, in which order."""
    group = parser.add_argument_group(
        "tensors, names and dtypes",
        "Globs (*, ?, [...]) match whole tensor names of the source. All but --order can be repeated.",
    )
    add_option(group, "--include", "GLOB", "take only tensors that match", repeated=True)
    add_option(group, "--exclude", "GLOB", "leave out tensors that match; they are not judged", repeated=True)
    text = "replace the first match of a Python regular expression in each name; a g at the end replaces every match"
    add_option(group, "--rename", "s/REGEX/NEW/", text, repeated=True)
    text = "cast floats to f16, bf16, f32 or f64, or those that match GLOB, and float8 that does; keep instead of a "
    text += "dtype leaves them as they are; the first rule that matches applies"
    add_option(group, "--dtype", "[GLOB=]DTYPE", text, repeated=True)
    text = "order of the tensors: as in the source (default), or by name"
    group.add_argument("--order", choices=("source", "name"), help=text)


def add_streaming(parser: argparse.ArgumentParser, target: str) -> None:
    """How much of the machine it may take, and what it says; ``target``: what the target's argument is called."""
    text = (
        f"folder for temporary files, which some pipes need (default: {target}'s folder; the system's if {target} is -)"
    )
    add_option(parser, "--spool-dir", "FOLDER", text)
    text = "memory limit (resident anonymous pages, the interpreter included); fails at the start if it is too low"
    add_option(parser, "--max-memory", "NBYTES", text, type=nbytes)
    text = "make warnings errors (exit code 3), such as a pattern or rule that has no effect; nothing is written then"
    add_flag(parser, "--strict", text=text)
    text = "print what would be done and write nothing; reads no tensor data, and only the head of a pipe"
    add_flag(parser, "--dry-run", text=text)
    add_jobs(parser, "one per core, at most 4")
    text = f"print the report as JSON: to stdout, or to stderr if {target} is -"
    add_flag(parser, "--json", text=text)
    text = "no progress bar and no summary, only errors and warnings"
    add_flag(parser, "--quiet", "-q", text=text)


def source_of(arguments: argparse.Namespace, standard: Standard) -> str | int | FileAt:
    """What ``source`` and ``offset`` name.  Raises: OptionError for an empty path, or a URL; UsageError."""
    path: str = arguments.source
    if path != STANDARD:
        require_path("SOURCE", path, "source")
    if not arguments.offset:
        return standard.source() if path == STANDARD else path
    if path == STANDARD:
        raise UsageError("--offset needs a file: stdin is read from its current position")
    from stream_pack.sources.open import FileAt

    return FileAt(path, arguments.offset)


def key_of(arguments: argparse.Namespace) -> str | list[str] | None:
    """The ``key`` that --key names.  Raises: UsageError."""
    given: list[str] | None = arguments.key
    if given is None or len(given) > 1:  # several are the steps of one
        return given
    if not given[0]:  # a variable that was not set; the key "" itself is the step after another, or key=[""]
        raise UsageError("--key is empty: expected the names of keys, or '.' for everything")
    return given[0]  # a dotted path


def convert_options(arguments: argparse.Namespace, progress: Progress | None = None) -> ConvertOptions:
    """The arguments that are options of the library, which knows the defaults of those not given."""
    from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
    from stream_pack.writer.options import ConvertOptions

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    names = [field.name for field in fields(ConvertOptions)]
    options = {name: given[name] for name in names if name in given}
    options["key"] = key_of(arguments)
    options["metadata"] = _metadata(given.get("metadata", ()))
    small = given.get("alignment", DEFAULT_ALIGNMENT.small)
    large = given.get("large_alignment", max(small, DEFAULT_ALIGNMENT.large))
    announce = None if arguments.quiet else note
    try:
        options["alignment"] = Alignment(small=small, large=large)
        return ConvertOptions(**options, progress=progress, announce=announce)
    except LimitError as error:
        raise UsageError(str(error)) from None


def _metadata(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for key, value in pairs:
        if metadata.setdefault(key, value) != value:
            raise UsageError(f"--metadata {quoted(key)} is given twice, with two values")
    return metadata


def note_all(told: Told, arguments: argparse.Namespace) -> None:
    """Print the warnings and remarks of a report or forecast on stderr."""
    for warning in told.warnings:
        note(f"warning: {warning}")
    if not arguments.quiet:
        for remark in told.remarks:
            note(f"note: {remark}")
