"""A disk that cannot be read in places: a library that the dynamic linker puts before the C library.

The reading functions of the C library are replaced in a process of its own; a read that touches the bad bytes of the
file ends with EIO, as Linux ends it when a sector is bad.  Where the file is mapped there is no function to replace:
what is tested is that nothing reads it that way.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["environment", "needs_compiler"]

needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or not Path("/proc/self/maps").exists(),
    reason="a bad disk is made with gcc, for Linux's dynamic linker",
)

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Whether [from, from + nbytes) of the descriptor's file has a bad byte; `*good` bytes before it can be read. */
static int is_bad(int fd, off_t from, size_t nbytes, size_t *good) {
    struct stat bad, have;
    const char *path = getenv("BAD_DISK_PATH");
    off_t begin = atoll(getenv("BAD_DISK_BEGIN")), end = atoll(getenv("BAD_DISK_END"));
    if (stat(path, &bad) || fstat(fd, &have) || bad.st_ino != have.st_ino || bad.st_dev != have.st_dev) return 0;
    if (from >= end || from + (off_t)nbytes <= begin) return 0;
    *good = from < begin ? (size_t)(begin - from) : 0;
    return 1;
}

ssize_t pread64(int fd, void *memory, size_t nbytes, off64_t from) {
    static ssize_t (*next)(int, void *, size_t, off64_t);
    size_t good;
    if (!next) next = dlsym(RTLD_NEXT, "pread64");
    if (is_bad(fd, from, nbytes, &good)) {
        if (!good) { errno = EIO; return -1; }
        nbytes = good;
    }
    return next(fd, memory, nbytes, from);
}

ssize_t pread(int fd, void *memory, size_t nbytes, off_t from) { return pread64(fd, memory, nbytes, from); }

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t from, int flags) {
    return pread64(fd, parts[0].iov_base, parts[0].iov_len, from); /* one part is all that is ever asked for */
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t from) {
    return preadv64v2(fd, parts, count, from, 0);
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t from) {
    return preadv64v2(fd, parts, count, from, 0);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t from, int flags) {
    return preadv64v2(fd, parts, count, from, flags);
}
"""


@functools.cache
def _library() -> str:
    folder = tempfile.mkdtemp(prefix="bad-disk-")
    source, library = Path(folder, "bad_disk.c"), Path(folder, "bad_disk.so")
    source.write_text(_SOURCE)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def environment(path: Path, begin: int, end: int) -> dict[str, str]:
    """This process's environment, for one in which the bytes ``[begin, end)`` of the file cannot be read."""
    return {
        **os.environ,
        "LD_PRELOAD": _library(),
        "BAD_DISK_PATH": str(path),
        "BAD_DISK_BEGIN": str(begin),
        "BAD_DISK_END": str(end),
    }
