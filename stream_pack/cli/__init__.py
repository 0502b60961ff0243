"""The command line: ``stream-pack``, or ``python -m stream_pack``.

``convert``, ``extract``, ``diff``, ``inspect``, ``verify`` and ``metal_plan`` are one command each: its arguments, its
call of the library, what it prints.  ``arguments`` has what they share, ``reading`` what those share that read a
checkpoint, ``terminal`` the standard streams, ``progress`` the progress bar, ``exits`` the exit codes.  :func:`main`
turns arguments into an exit code; NumPy is not imported before a command needs it.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from stream_pack._version import __version__
from stream_pack.cli.arguments import STANDARD, Command, shown_path
from stream_pack.cli.convert import CONVERT
from stream_pack.cli.diff import DIFF
from stream_pack.cli.exits import BROKEN_PIPE, DAMAGE, DONE, INPUT, MACHINE, USAGE, UsageError
from stream_pack.cli.extract import EXTRACT
from stream_pack.cli.inspect import INSPECT
from stream_pack.cli.metal_plan import METAL_PLAN
from stream_pack.cli.terminal import Standard, complain, say
from stream_pack.cli.verify import VERIFY
from stream_pack.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    NewerVersionError,
    NotAPackError,
    OptionError,
    RawPayloadError,
    ReadError,
    SourceError,
    StreamPackError,
)
from stream_pack.text import printable

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, Command] = {
    "convert": CONVERT,
    "extract": EXTRACT,
    "diff": DIFF,
    "inspect": INSPECT,
    "verify": VERIFY,
    "metal-plan": METAL_PLAN,
}

_EXIT_CODES = """\
exit codes:
  0  success
  1  damage: the pack is truncated, or its bytes are not those that were written; of diff: there is a difference
  2  usage error
  3  the input cannot be used: not a checkpoint, not a pack, made by a newer version, an unsupported tensor, a raw
     payload without checksums to verify, or a file that does not exist or cannot be opened
  4  system error (disk full, I/O error, out of memory), or a bug in stream-pack
  130 (143, 129)  interrupted by SIGINT (SIGTERM, SIGHUP); the target is unchanged and temporary files are removed
  141  stdout was closed by its reader
"""

_PATH_ERRNOS = frozenset({
    errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENODEV, errno.ENOENT,
    errno.ENOTDIR, errno.ENXIO, errno.EPERM, errno.EROFS,
})  # fmt: skip
"""What opening a wrong path gives; every other errno is a failure of the machine."""


class _Interrupted(KeyboardInterrupt):
    """A signal to stop: the stack is unwound, so that temporary files are removed."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def main(argv: Sequence[str] | None = None, *, prog: str = "stream-pack") -> int:
    """Run one command and return its exit code (see ``--help``).

    ``argv``: None means the arguments of this process.  ``prog``: how the user calls the program.
    """
    standard = Standard.take()
    try:
        with _stopping_on_signals():
            code = _run(sys.argv[1:] if argv is None else argv, standard, prog)
            standard.flush()
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough: there is nothing to report.
        standard.abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        complain(f"{error.strerror or error}: stdout")
        return MACHINE
    except _Interrupted as interruption:
        return 128 + interruption.signum
    return code


def _run(argv: Sequence[str], standard: Standard, prog: str) -> int:
    try:
        arguments = _parse(argv, prog)
    except _Misused as error:  # the text has been printed
        if "--json" in argv:
            standard.report(_json_of(UsageError(str(error)), str(error), USAGE))
        return USAGE
    except SystemExit:  # after --help or --version
        return DONE
    try:
        return COMMANDS[arguments.command].run(arguments, standard)
    except BrokenPipeError:
        raise
    except Exception as error:
        text, code = _told(error, arguments)
        complain(text)
        if arguments.json:
            show = say if getattr(arguments, "target", "") == STANDARD else standard.report
            show(_json_of(error, text, code, path=arguments.source))
        return code


def _told(error: Exception, arguments: argparse.Namespace) -> tuple[str, int]:
    """What to say of an error, and the exit code that it gives."""
    command = COMMANDS[arguments.command]
    source = shown_path(arguments.source, "stdin")
    if isinstance(error, UsageError | OptionError):
        return str(error), USAGE
    if isinstance(error, StreamPackError):
        named = command.reads in ("pack", "two") or (
            command.reads == "anything" and not _is_of_source(error, arguments)
        )
        text = str(error) if named else f"{source}: {error}"
        return text, _exit_of(error, command)
    if isinstance(error, OSError):
        return _text_of(error, arguments), INPUT if error.errno in _PATH_ERRNOS else MACHINE
    if isinstance(error, MemoryError):
        return f"{source}: out of memory", MACHINE
    # Not 1, Python's own code for a traceback, which would mean damage.
    traceback.print_exception(error)
    return f"{source}: internal error: {type(error).__name__}: {error}; please report it", MACHINE


def _json_of(error: BaseException, message: str, code: int, *, path: str | None = None) -> str:
    """An error for programs: what is printed where the command's report would have been."""
    return json.dumps({"ok": False, "error": type(error).__name__, "message": message, "exit": code, "path": path})


class _Misused(SystemExit):
    """The command line cannot be parsed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except SystemExit:
            raise _Misused(message) from None


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Raises: SystemExit, after printing the help, the version, or what is wrong."""
    parser = _Parser(
        prog=prog,
        description="Convert PyTorch checkpoints of any size to packs: memory-mapped files whose tensors are used in\n"
        "place. Inspect and verify packs.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stream_pack {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {}
    for name, command in COMMANDS.items():
        added = subparsers.add_parser(name, help=command.summary, description=command.description)
        command.add_arguments(added, argv)
        parsers[name] = added
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # the command's parser shows the usage of the command
        parsers[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def _exit_of(error: StreamPackError, command: Command) -> int:
    if isinstance(error, ReadError):
        return MACHINE
    unusable = isinstance(error, NotAPackError | RawPayloadError | NewerVersionError)
    damaged = isinstance(error, FormatError | ChecksumError) and not unusable
    return DAMAGE if command.reads in ("pack", "anything") and damaged else INPUT


def _is_of_source(error: StreamPackError, arguments: argparse.Namespace) -> bool:
    """Whether a source, which knows no path, has raised ``error``."""
    return isinstance(error, SourceError | LimitError) or arguments.source == STANDARD


def _text_of(error: OSError, arguments: argparse.Namespace) -> str:
    reason = error.strerror or str(error)
    source, target = arguments.source, getattr(arguments, "target", None) or ""
    if error.filename is not None:
        # Shown as the user gave it, not in full.
        path = os.fsdecode(error.filename)
        given = (name for name in (source, target) if path in (os.path.abspath(name), os.path.realpath(name)))
        return f"{reason}: {printable(next(given, path))}"
    shown = shown_path(source, "stdin")
    if target:
        return f"{reason}, converting {shown} to {shown_path(target, 'stdout')}"
    return f"{reason}: {shown}"


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into :class:`_Interrupted`, except those that are ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signals}

    def stop(signum: int, frame: FrameType | None) -> None:
        # A second signal must not interrupt the cleanup (SIGQUIT, Ctrl-\, still can).
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise _Interrupted(signum)

    for signum, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
