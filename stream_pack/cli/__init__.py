"""The command line: ``python -m stream_pack``, installed as ``stream-pack``.

:func:`main` turns arguments into an exit code; nothing here imports NumPy or torch before a command needs it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from stream_pack.cli import commands
from stream_pack.cli.arguments import Arguments, parse
from stream_pack.cli.exits import (
    BROKEN_PIPE,
    DAMAGE,
    INPUT,
    MACHINE,
    USAGE,
    UsageError,
)
from stream_pack.cli.metal_plan import metal_plan
from stream_pack.cli.terminal import Standard, complain
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

__all__ = ["main"]

_COMMANDS = {
    "convert": commands.convert,
    "inspect": commands.inspect,
    "metal-plan": metal_plan,
    "verify": commands.verify,
}

_PATH_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
    }
)
"""What a path that should not have been named gives; every other errno is the machine's."""


class _Interrupted(KeyboardInterrupt):
    """A signal that asks to stop: everything is unwound, so that no temporary file stays."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see ``--help``).  ``argv`` None: this process's arguments."""
    standard = Standard.take()
    try:
        with _stopping_on_signals():
            code = _run(sys.argv[1:] if argv is None else argv, standard)
            standard.flush()
    except BrokenPipeError:
        # Whoever read our output has enough (head, less): nothing to say.
        standard.abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        complain(f"{error.strerror or error}: stdout")
        return MACHINE
    except _Interrupted as interruption:
        return 128 + interruption.signum
    return code


def _run(argv: Sequence[str], standard: Standard) -> int:
    try:
        arguments = parse(argv)
    except SystemExit as exit_:  # argparse has printed what there is to say
        return exit_.code if isinstance(exit_.code, int) else USAGE
    try:
        return _COMMANDS[arguments.command](arguments, standard)
    except (UsageError, OptionError) as error:
        complain(str(error))
        return USAGE
    except StreamPackError as error:
        # The reader names its file itself, a source may be anything that can be read.
        complain(f"{arguments.subject}: {error}" if arguments.command == "convert" else str(error))
        return _exit_of(error, arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(_text_of(error, arguments))
        return INPUT if error.errno in _PATH_ERRNOS else MACHINE
    except MemoryError:
        complain(f"{arguments.subject}: out of memory")
        return MACHINE
    except Exception as error:
        # Not 1, Python's own code for a traceback: that would read as damage found.
        traceback.print_exc()
        complain(f"{arguments.subject}: a fault of stream_pack itself: {type(error).__name__}")
        return MACHINE


def _exit_of(error: StreamPackError, arguments: Arguments) -> int:
    if arguments.command == "convert" or isinstance(
        error, NotAPackError | RawPayloadError | NewerVersionError
    ):
        return INPUT
    return DAMAGE if isinstance(error, FormatError | ChecksumError) else INPUT


def _text_of(error: OSError, arguments: Arguments) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{reason}: {_as_given(os.fsdecode(error.filename), arguments)}"
    if arguments.command == "convert":
        return f"{reason}, converting {arguments.subject} to {arguments.object}"
    return f"{reason}: {arguments.subject}"


def _as_given(path: str, arguments: Arguments) -> str:
    """The path in the words of the user, who did not say it in full."""
    for given in (arguments.source, arguments.target):
        if path in (os.path.abspath(given), os.path.realpath(given)):
            return printable(given)
    return printable(path)


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into :class:`_Interrupted`; those that are ignored (nohup) stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    before = {
        signum: signal.getsignal(signum)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }

    def stop(signum: int, frame: FrameType | None) -> None:
        # Impatience must not interrupt the cleaning up (Ctrl-\ still ends it all).
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
