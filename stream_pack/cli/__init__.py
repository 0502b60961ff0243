"""The command line: ``stream-pack``, or ``python -m stream_pack``.

``convert``, ``inspect``, ``verify`` and ``metal_plan`` are one command each: its arguments, its call of the library,
what it prints.  ``arguments`` has what they share, ``terminal`` the standard streams, ``progress`` the progress bar,
``exits`` the exit codes.  :func:`main` turns arguments into an exit code; NumPy is not imported before a command needs
it.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from stream_pack._version import __version__
from stream_pack.cli.arguments import Command, shown_path
from stream_pack.cli.convert import CONVERT
from stream_pack.cli.exits import BROKEN_PIPE, DAMAGE, INPUT, MACHINE, USAGE, UsageError
from stream_pack.cli.inspect import INSPECT
from stream_pack.cli.metal_plan import METAL_PLAN
from stream_pack.cli.terminal import Standard, complain
from stream_pack.cli.verify import VERIFY
from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    OptionError,
    RawPayloadError,
    StreamPackError,
)
from stream_pack.text import printable

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, Command] = {"convert": CONVERT, "inspect": INSPECT, "verify": VERIFY, "metal-plan": METAL_PLAN}

_EXIT_CODES = """\
exit codes:
  0  success
  1  damage: the pack is truncated, or its bytes are not those that were written
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
    except SystemExit as exiting:  # argparse has printed the message
        return exiting.code if isinstance(exiting.code, int) else USAGE
    command = COMMANDS[arguments.command]
    source = shown_path(arguments.source, "stdin")
    try:
        return command.run(arguments, standard)
    except (UsageError, OptionError) as error:
        complain(str(error))
        return USAGE
    except StreamPackError as error:
        complain(f"{source}: {error}" if command.reads == "checkpoint" else str(error))
        return _exit_of(error, command)
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(_text_of(error, arguments))
        return INPUT if error.errno in _PATH_ERRNOS else MACHINE
    except MemoryError:
        complain(f"{source}: out of memory")
        return MACHINE
    except Exception as error:
        # Not 1, Python's own code for a traceback, which would mean damage.
        traceback.print_exc()
        complain(f"{source}: internal error: {type(error).__name__}: {error}; please report it")
        return MACHINE


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Raises: SystemExit, after printing the help, the version, or what is wrong."""
    parser = argparse.ArgumentParser(
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
    unusable = isinstance(error, NotAPackError | RawPayloadError | NewerVersionError)
    damaged = isinstance(error, FormatError | ChecksumError) and not unusable
    return DAMAGE if command.reads == "pack" and damaged else INPUT


def _text_of(error: OSError, arguments: argparse.Namespace) -> str:
    reason = error.strerror or str(error)
    source, target = arguments.source, getattr(arguments, "target", "")
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
