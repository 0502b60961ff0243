"""The unfinished file beside a target: made under a name of its own, and removed when its writer is gone.

Its name tells the machine (as long as it runs), the target, and the writer, of which 64 random bits are left.  A living
writer shows itself in two ways:

* It holds a lock (flock) on its file from the start, which the kernel releases when the process ends, however it ends.
  Where a lock is held, there is a writer; where none is held on a file of this very machine, there is none any more.
  Of other machines a lock tells nothing: some network file systems keep locks to one machine.
* It renews a lease, the file's time of modification, every :data:`RENEWAL_SECONDS`, also while its source gives
  nothing.  A lease ends :data:`LEASE_SECONDS` later, by the clock of the file system, the same for all its machines.

So a writer removes the files of this machine that nobody has locked, and those of its own target whose lease has ended,
whatever machine they are of.  A file of another target whose lease has ended is left, and reported.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import xxhash

__all__ = ["LEASE_SECONDS", "RENEWAL_SECONDS", "Temporary"]

RENEWAL_SECONDS = 60.0
LEASE_SECONDS = 600.0
"""Ten renewals: a machine that is busy, or a server that does not answer for minutes, loses none."""

PREFIX, SUFFIX = ".stream_pack-", ".tmp"
_NAME = re.compile(re.escape(PREFIX) + "([0-9a-f]{8})-(?:([0-9a-f]{16})-)?[0-9a-f]{16}" + re.escape(SUFFIX))
"""Machine, and target; packs of early versions have no target in the name, and the host's name as the machine."""


class Temporary:
    """A new, empty file in ``folder``, open and locked, for a target that is to be called ``name`` there.

    ``private``: only its owner may read it; else the umask decides.
    ``file`` is its descriptor, ``path`` its path.  The lock ends with the last descriptor of this opening.
    Lifetime: :meth:`discard` closes and removes the file; in a process that was forked off, it only closes it.
    Raises: OSError.
    """

    def __init__(self, folder: str, name: str, *, private: bool) -> None:
        self._folder = folder
        self._target = _target(name)
        self.file, self.path = self._create(0o600 if private else 0o666)  # the kernel takes the umask off
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def _create(self, mode: int) -> tuple[int, str]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            name = f"{PREFIX}{_machine()}-{self._target}-{os.urandom(8).hex()}{SUFFIX}"
            path = os.path.join(self._folder, name)
            file = os.open(path, flags, mode)
            try:
                with suppress(OSError):  # no locks here
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_nlink:
                    return file, path
            except BaseException:
                os.close(file)
                with suppress(OSError):
                    os.unlink(path)
                raise
            os.close(file)  # removed by another process before it was locked: try again

    def begin_lease(self) -> None:
        """Renew the lease until :meth:`discard`, in a thread of its own."""
        thread = threading.Thread(target=self._renew, name="stream_pack-lease", daemon=True)
        with suppress(RuntimeError):  # no thread to be had: every write renews it, too
            thread.start()

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL_SECONDS):
            with suppress(OSError):  # of a server that does not answer now
                self.renew()

    def renew(self) -> int:
        """Renew the lease now; returns what time it is for the file system, in ns."""
        with self._lock:
            if self._ended.is_set():  # the descriptor may be that of another file by now
                return 0
            with suppress(OSError):
                os.utime(self.file)
            return os.fstat(self.file).st_mtime_ns

    def discard(self) -> None:
        """Close the file, and remove it if it still has its name.  To be called once."""
        if self._process == os.getpid():
            with self._lock:
                self._ended.set()
                os.close(self.file)
            with suppress(FileNotFoundError):  # it was renamed to the target
                os.unlink(self.path)
        else:
            os.close(self.file)

    def sweep(self) -> list[str]:
        """Remove what other writers have left in the folder, as far as that is known of them.

        Returns the names of what may have been left and is still there.
        """
        lapsed = self.renew() - int(LEASE_SECONDS * 1e9)
        left = []
        with suppress(OSError):  # a folder may be writable and not readable
            with os.scandir(self._folder) as entries:
                found = [entry.name for entry in entries]
            for name in sorted(found):
                match = _NAME.fullmatch(name)
                if match and not self._remove_if_dead(name, match[1], match[2], lapsed):
                    left.append(name)
        return left

    def _remove_if_dead(self, name: str, machine: str, target: str | None, lapsed: int) -> bool:
        """Remove the file if its writer is gone.  Returns False if that seems so, and the file is still there."""
        path = os.path.join(self._folder, name)
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                return True  # of somebody else
            with suppress(PermissionError):
                return self._remove_if_unlocked(path, machine, target, lapsed)
            # Of another user: its lease is all there is to see.
            if status.st_mtime_ns >= lapsed:
                return True
            if target == self._target:
                os.unlink(path)
            return target == self._target
        except FileNotFoundError:  # another process has removed it, or its writer is done
            return True
        except OSError:
            return False

    def _remove_if_unlocked(self, path: str, machine: str, target: str | None, lapsed: int) -> bool:
        # Without waiting for a FIFO, and not through a symbolic link: others may write into the folder, too.
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return True
            here = machine in (_machine(), _host())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True  # it has a living writer
            except OSError:  # no locks here
                here = False
            ended = status.st_mtime_ns < lapsed
            if here or (ended and target == self._target):
                os.unlink(path)
                return True
            return not ended
        finally:
            os.close(file)


def _target(name: str) -> str:
    # The name alone: another machine may have the folder elsewhere.
    return xxhash.xxh3_64_hexdigest(os.fsencode(name))


def _machine() -> str:
    """Tells machines apart, from one start to the next; all containers on one are the same, as their locks are."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return _host()
    return f"{crc32(machine):08x}"


def _host() -> str:
    return f"{crc32(os.uname().nodename.encode()):08x}"
