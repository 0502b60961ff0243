"""What a new file takes over from the one that it replaces: owner, group, mode, POSIX ACL and ``user.*`` attributes.

Who could not use the old file cannot use the new one: what cannot be taken over leaves fewer rights.  ``security.*``
(the label of SELinux, for one) is left to the kernel, which gives a new file its own; ``trusted.*`` and the ACLs of
macOS are not taken over.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from stream_pack.text import listed

__all__ = ["take_over"]

_POSIX_ACL, _NFS4_ACL = "system.posix_acl_access", "system.nfs4_acl"


def take_over(file: int, path: str, old: os.stat_result) -> tuple[str, ...]:
    """Give the empty ``file``, which only its owner may read, what ``path`` has, whose status is ``old``.

    Returns a warning for each thing that could not be taken over and may be missed.
    Raises: OSError, but for what a file system or the rights of this process do not allow.
    """
    group_kept = _take_owner(file, old)
    mode = stat.S_IMODE(old.st_mode)
    if os.fstat(file).st_uid != old.st_uid:
        mode &= ~stat.S_ISUID
    if not group_kept:
        # The bits would be those of another group, and its old members are others now: what both had is left.
        shared = (mode >> 3) & mode & 0o7
        mode = (mode & 0o700) | shared << 3 | shared
    lost = _take_user_attributes(file, path)
    warnings = [f"the target's attributes {listed(lost)} could not be kept"] if lost else []
    # Before the mode: under a POSIX ACL the group's bits are its mask, which alone would give the group all of it.  The
    # new file may have one from its folder.  One with rights of the old group is of no use for another.
    listed_rights = _attribute(path, _POSIX_ACL) is not None
    kept = (group_kept or not listed_rights) and _take_acl(file, path, _POSIX_ACL)
    _set_mode(file, mode if kept else mode & 0o700)
    # After the mode, which rewrites it.
    if not _take_acl(file, path, _NFS4_ACL):
        kept = False
        _set_mode(file, mode & 0o700)
    if not kept:
        warnings.append("the target's access control list could not be kept: only its owner can use the new file")
    return tuple(warnings)


def _take_owner(file: int, old: os.stat_result) -> bool:
    """Take over owner and group as far as this process may; returns whether the group is the old one."""
    for owner in (old.st_uid, -1):  # a user may replace a file that another owns, but not give one away
        new = os.fstat(file)
        if (new.st_uid if owner == -1 else owner, old.st_gid) == (new.st_uid, new.st_gid):
            return True
        with suppress(PermissionError):
            os.fchown(file, owner, old.st_gid)
            return True
    return False


def _take_user_attributes(file: int, path: str) -> list[str]:
    """Copy ``user.*``; returns the names of those that could not be copied."""
    lost = []
    for name in _names(path):
        if name.startswith("user."):
            try:
                os.setxattr(file, name, os.getxattr(path, name))
            except OSError:  # this user may not read them, or the file system has no room for them
                lost.append(name)
    return lost


def _take_acl(file: int, path: str, name: str) -> bool:
    """Give ``file`` the ACL of ``path``, or none; returns whether both are the same now."""
    old, new = _attribute(path, name), _attribute(file, name)
    if old == new:
        return True
    try:
        if old is None:
            os.removexattr(file, name)
        else:
            os.setxattr(file, name, old)
    except OSError:
        return False
    return True


def _names(file: int | str) -> list[str]:
    if not hasattr(os, "listxattr"):  # macOS
        return []
    try:
        return os.listxattr(file)
    except OSError:  # a file system without attributes
        return []


def _attribute(file: int | str, name: str) -> bytes | None:
    if name not in _names(file):
        return None
    try:
        return os.getxattr(file, name)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise


def _set_mode(file: int, mode: int) -> None:
    try:
        os.fchmod(file, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise  # a file system without modes (FAT, some network ones) may refuse to set one
