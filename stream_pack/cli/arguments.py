"""What the commands share: how one is described, and the arguments that several of them take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from stream_pack.arguments.paths import require_path
from stream_pack.cli.terminal import Standard
from stream_pack.text import printable

__all__ = [
    "STANDARD", "Command", "add_file", "add_flag", "add_jobs", "add_offset", "add_option", "key_value", "local_file",
    "nbytes", "positive", "shown_path",
]  # fmt: skip

STANDARD = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    ``add_arguments(parser, argv)`` declares its arguments; ``run(arguments, standard)`` returns its exit code.
    ``reads``: what its first argument, ``source``, names.  The errors of reading a pack name the file, those of reading
    a checkpoint, or stdin, do not.
    """

    summary: str
    description: str
    reads: Literal["pack", "checkpoint", "anything", "two"]
    add_arguments: Callable[[argparse.ArgumentParser, Sequence[str]], None]
    run: Callable[[argparse.Namespace, Standard], int]


def shown_path(path: str, standard: Literal["stdin", "stdout"]) -> str:
    """``path`` for a message, or the name of the standard stream that it stands for."""
    return standard if path == STANDARD else printable(path)


def add_option(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str,
    text: str,
    *,
    type: Callable[[str], object] = str,
    repeated: bool = False,
) -> None:
    """An option with a value; a list of values if it can be ``repeated``."""
    action = "append" if repeated else "store"
    parser.add_argument(name, metavar=metavar, help=text, type=type, action=action)


def add_flag(parser: argparse._ActionsContainer, *names: str, text: str) -> None:
    """An option without a value."""
    parser.add_argument(*names, action="store_true", help=text)


def add_file(parser: argparse.ArgumentParser, name: str) -> None:
    """The file that a command reads in place, where to start in it, and --json."""
    parser.add_argument("source", metavar=name, type=_path)
    add_offset(parser)
    add_flag(parser, "--json", text="print JSON instead of text, also for an error")


def local_file(arguments: argparse.Namespace, name: str) -> str:
    """The file of :func:`add_file`.  Raises: OptionError for an empty name, or a URL."""
    path: str = arguments.source
    require_path(name, path, "file")
    return path


def add_offset(parser: argparse.ArgumentParser) -> None:
    """Where to start in a file."""
    text = "file offset to start at (default 0); inspect shows it for packs inside a .pte"
    add_option(parser, "--offset", "NBYTES", text, type=nbytes)
    parser.set_defaults(offset=0)


def add_jobs(parser: argparse.ArgumentParser, default: str) -> None:
    """How many threads to use."""
    add_option(parser, "--jobs", "N", f"threads to use (default: {default})", type=positive)


def nbytes(text: str) -> int:
    """A number of bytes, such as 4096, 16K or 3.5G."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)", text)
    if match:
        number = Fraction(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
        if number.denominator == 1:
            return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 4096, 16K or 3.5G")


def key_value(text: str) -> tuple[str, str]:
    """KEY=VALUE in UTF-8."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no '=': expected KEY=VALUE")
    try:
        text.encode()
    except UnicodeEncodeError:
        # Arguments that are not UTF-8 arrive as lone surrogates.
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8, as metadata must be") from None
    return key, value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _path(text: str) -> str:
    if text == STANDARD:
        raise argparse.ArgumentTypeError("the file is memory-mapped, which stdin cannot be")
    return text
