"""Standard input, output and error, as descriptors for bytes and as streams for text."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass

from stream_pack.cli.exits import UsageError
from stream_pack.text import printable
from stream_pack.writer.writeback import write_some

__all__ = ["Standard", "complain", "note", "say"]

_STDIN, _STDOUT, _STDERR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Standard:
    """The three standard descriptors; ``closed`` holds those that were closed when the process started."""

    closed: frozenset[int]

    @classmethod
    def take(cls) -> Standard:
        """Check the descriptors, and open /dev/null for those that are closed.

        Otherwise the next file opened would get the number, and output to stdout would overwrite that file.
        """
        closed = set()
        for descriptor in (_STDIN, _STDOUT, _STDERR):
            try:
                os.fstat(descriptor)
            except OSError:
                closed.add(descriptor)
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        return cls(frozenset(closed))

    def source(self) -> int:
        """The descriptor to read a checkpoint from.  Raises: UsageError."""
        if _STDIN in self.closed or os.isatty(_STDIN):
            what = "closed" if _STDIN in self.closed else "a terminal"
            raise UsageError(f"stdin is {what}: pipe a checkpoint in, or give a file name")
        return _STDIN

    def target(self) -> int:
        """The descriptor to write a pack to.  Raises: UsageError."""
        self.require_stdout()
        if os.isatty(_STDOUT):
            raise UsageError("stdout is a terminal, and a pack is binary: redirect it, or give a file name")
        return _STDOUT

    def descriptor(self) -> int:
        """The descriptor to write text to.  Raises: UsageError."""
        self.require_stdout()
        return _STDOUT

    def write(self, text: str) -> None:
        """Write the result of a command to stdout.  Raises: UsageError; OSError."""
        self.require_stdout()
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        # Not through sys.stdout: unbuffered (python -u), it drops what a single write does not accept.
        data = memoryview(f"{text}\n".encode(encoding, "backslashreplace"))
        try:
            while data:
                data = data[write_some(_STDOUT, [data]) :]
        except OSError as error:  # the command's input is not at fault
            raise OSError(error.errno, error.strerror, "stdout") from None

    def report(self, text: str) -> None:
        """:meth:`write`, for an error that is on stderr too: a stdout that takes no text does not fail the command."""
        if _STDOUT not in self.closed:
            with suppress(OSError):
                self.write(text)

    def width(self) -> int | None:
        """Columns of the terminal; None if stdout is no terminal, and lines may have any length."""
        try:
            return os.get_terminal_size(_STDOUT).columns or None
        except OSError:
            return None

    def is_terminal(self) -> bool:
        """Whether stdout is one."""
        return os.isatty(_STDOUT)

    def flush(self) -> None:
        """Flush stdout, so that it fails here and not while the interpreter exits.  Raises: OSError."""
        if _STDOUT not in self.closed:
            sys.stdout.flush()

    def abandon_stdout(self) -> None:
        """Discard what is still buffered, because stdout has no reader any more."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)

    def require_stdout(self) -> None:
        """Raises: UsageError when stdout is closed."""
        if _STDOUT in self.closed:
            raise UsageError("stdout is closed: nothing can be printed or written to it")


def complain(text: str) -> None:
    """Print an error on stderr."""
    note(f"error: {text}")


def note(text: str) -> None:
    """Print one line on stderr, after the name of the program."""
    say(f"stream-pack: {text}")


def say(text: str) -> None:
    """Print one line on stderr.  A stderr that cannot be written to does not fail the command."""
    if sys.stderr is None:
        return
    try:
        encoding = sys.stderr.encoding or "utf-8"
        encodable = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        sys.stderr.write(f"{encodable}\n")
        sys.stderr.flush()
    except OSError:
        pass
