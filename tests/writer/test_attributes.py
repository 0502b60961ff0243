"""A file that replaces another lets in nobody whom that one kept out, and keeps what users have attached to it."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack.writer.parallel import ParallelWriter, PartWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "setxattr"), reason="this system's Python knows no file attributes")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
OWNER, USER, GROUP, MASK, OTHER = 1, 2, 4, 0x10, 0x20
ALICE, BOB, STAFF = 1002, 1005, 100
TENSORS = {"w": np.ones(4)}


def acl(*, owner: int = 6, users: dict[int, int] | None = None, group: int = 0, mask: int = 6, other: int = 0) -> bytes:
    """Source: linux/posix_acl_xattr.h: version 2, then tag, permissions and id of each entry."""
    nobody = 0xFFFFFFFF
    entries = [(OWNER, owner, nobody), *((USER, rights, user) for user, rights in (users or {}).items())]
    entries += [(GROUP, group, nobody), (MASK, mask, nobody), (OTHER, other, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may write to, outside pytest's own, which others may not enter."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        yield Path(path)


def set_attribute(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip(f"the file system of {path} has no {name}")


def replaced(folder: Path, mode: int, *, group: int = STAFF, rights: bytes | None = None) -> Path:
    """A target that is there already."""
    path = folder / "target"
    path.write_bytes(b"old")
    if os.geteuid() == 0:
        os.chown(path, 0, group)
    path.chmod(mode)
    if rights is not None:
        set_attribute(path, ACCESS, rights)
    return path


def save(path: Path) -> tuple[str, ...]:
    return stream_pack.save_file(TENSORS, path).warnings


def by_user(user: int, groups: list[int], action: Callable[[], object]) -> int:
    """The errno that ``action`` ends with in a process of that user; 0 if it succeeds."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups(groups)
            os.setgid(groups[0])
            os.setuid(user)
            action()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def may(path: Path, flags: int, user: int, groups: list[int]) -> bool:
    code = by_user(user, groups, lambda: os.close(os.open(path, flags)))
    assert code in (0, errno.EACCES)
    return code == 0


def write_with_writer(path: Path) -> None:
    with stream_pack.Writer(path, {"w": ("uint8", [1])}) as writer:
        writer.write("w", b"x")


def write_in_parts(path: Path) -> None:
    with ParallelWriter(path, {"w": ("uint8", [1])}) as pack:
        with PartWriter(pack.unfinished_path) as writer:
            writer.write("w", b"x")
            part = writer.finish()
        pack.commit([part])


@needs_root
@pytest.mark.parametrize("write", [save, write_with_writer, write_in_parts])
def test_who_had_rights_by_the_access_control_list_keeps_them_and_nobody_else_gets_any(
    write: Callable[[Path], object], folder: Path
) -> None:
    path = replaced(folder, 0o600, rights=acl(users={ALICE: 6}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660  # the group's bits are the mask
    assert not may(path, os.O_RDONLY, BOB, [STAFF])
    write(path)
    assert os.getxattr(path, ACCESS) == acl(users={ALICE: 6})
    assert may(path, os.O_RDWR, ALICE, [ALICE])
    assert not may(path, os.O_RDONLY, BOB, [STAFF])


def test_attributes_of_users_are_kept(tmp_path: Path) -> None:
    path = replaced(tmp_path, 0o644)
    set_attribute(path, "user.origin", b"https://example.org/\0\xff")
    set_attribute(path, "user.empty", b"")
    assert save(path) == ()
    assert os.getxattr(path, "user.origin") == b"https://example.org/\0\xff"
    assert os.getxattr(path, "user.empty") == b""


def test_attributes_that_cannot_be_kept_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = replaced(tmp_path, 0o644)
    set_attribute(path, "user.origin", b"x")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "setxattr", full)
    assert save(path) == ("the target's attributes 'user.origin' could not be kept",)


@needs_root
def test_an_access_control_list_that_cannot_be_kept_leaves_the_owner_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = replaced(folder, 0o600, rights=acl(users={ALICE: 6}, other=4))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    with monkeypatch.context() as patched:
        patched.setattr(os, "setxattr", refuse)
        (warning,) = save(path)
    assert "access control list could not be kept: only its owner can use the new file" in warning
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not may(path, os.O_RDONLY, BOB, [STAFF])


@needs_root
def test_rights_that_the_folder_gives_to_new_files_are_not_given_to_a_replaced_one(folder: Path) -> None:
    path = replaced(folder, 0o640)
    set_attribute(folder, DEFAULT, acl(users={BOB: 6}, group=6))
    assert save(path) == ()
    assert not may(path, os.O_RDONLY, BOB, [BOB])
    assert may(path, os.O_RDONLY, ALICE, [STAFF])
    assert ACCESS not in os.listxattr(path)
    save(folder / "new")
    assert may(folder / "new", os.O_RDONLY, BOB, [BOB])


@needs_root
def test_rights_from_the_folder_that_cannot_be_taken_away_leave_the_owner_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = replaced(folder, 0o640)
    set_attribute(folder, DEFAULT, acl(users={BOB: 6}, group=6))

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(os, "removexattr", refuse)
        assert len(save(path)) == 1
    assert not may(path, os.O_RDONLY, BOB, [BOB])


@needs_root
@pytest.mark.parametrize(
    ("mode", "groups", "left"),
    [
        (0o660, [ALICE], 0o600),  # Alice's own group would get the rights of staff
        (0o664, [ALICE], 0o644),
        (0o604, [ALICE], 0o600),  # staff, which was kept out, are others now
        (0o4775, [ALICE], 0o755),
        (0o660, [ALICE, STAFF], 0o660),
        (0o4750, [ALICE, STAFF], 0o750),
    ],
)
def test_a_user_who_replaces_anothers_file_gives_its_rights_to_no_other_group(
    mode: int, groups: list[int], left: int, folder: Path
) -> None:
    path = replaced(folder, mode)
    assert by_user(ALICE, groups, lambda: save(path)) == 0
    assert path.stat().st_uid == ALICE
    assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(left)


@needs_root
def test_a_list_of_rights_is_not_kept_for_another_group(folder: Path) -> None:
    path = replaced(folder, 0o600, rights=acl(users={BOB: 6}, group=6))
    assert by_user(ALICE, [ALICE], lambda: save(path)) == 0
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (ALICE, 0o600)
    path = replaced(folder, 0o600, rights=acl(users={BOB: 6}, group=6))
    assert by_user(ALICE, [ALICE, STAFF], lambda: save(path)) == 0
    assert os.getxattr(path, ACCESS) == acl(users={BOB: 6}, group=6)


@needs_root
def test_what_is_not_finished_can_be_read_by_nobody_who_could_not_read_the_target(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = replaced(folder, 0o600)
    modes: list[int] = []
    fchmod = os.fchmod

    def noting(file: int, mode: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(file).st_mode))
        fchmod(file, mode)
        modes.append(stat.S_IMODE(os.fstat(file).st_mode))

    monkeypatch.setattr(os, "fchmod", noting)
    save(path)
    assert set(modes) == {0o600}


def test_a_file_system_without_attributes_takes_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[str]:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    path = replaced(tmp_path, 0o640)
    monkeypatch.setattr(os, "listxattr", refuse)
    assert save(path) == ()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
