"""What ExecuTorch sees in place of a constant's bytes.

ExecuTorch wants ``bytes``, and C code that is given some reads their memory without asking.  So a placeholder is
``bytes`` whose memory is a token: unequal contents have unequal tokens, so that hashing and comparing them decides as
for the contents.  Everything that Python code can ask of it is answered for the contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex

from stream_pack.errors import StateError
from stream_pack.executorch.export.held import Held, OnDisk
from stream_pack.executorch.export.session import active

__all__ = ["HeldBytes", "held_in"]

MAGIC = b"stream_pack: a placeholder"
"""Found in a file, this says what happened."""


class HeldBytes(OnDisk, bytes):
    """Stands for ``held``, called ``label`` in messages.

    Reading it (a slice, ``bytes()``, iterating, adding) gives the contents, from disk.  Copies: what the same would
    copy of ordinary bytes.

    Its length is told only inside a block of ``streaming_constants``, where the functions of ExecuTorch that go on to
    copy the bytes in C are replaced; elsewhere StateError is raised, before a token can be taken for the contents.
    """

    held: Held
    label: str

    def __new__(cls, held: Held, label: str = "") -> HeldBytes:
        token = b"%s %s %d" % (MAGIC, held.digest.hex().encode(), held.nbytes)
        self = super().__new__(cls, token)
        self.held = held
        self.label = label
        return self

    def __len__(self) -> int:
        self._check_inside()
        return self.held.nbytes

    def __bool__(self) -> bool:
        self._check_inside()
        return self.held.nbytes > 0

    def __bytes__(self) -> bytes:
        return self.held.read(0, self.held.nbytes)

    def __getitem__(self, key: SupportsIndex | slice) -> int | bytes:  # type: ignore[override]
        if isinstance(key, slice):
            begin, end, step = key.indices(self.held.nbytes)
            if step == 1:
                return self.held.read(begin, end)
            return bytes(self)[key]
        return self.held.read(*_one(key, self.held.nbytes))[0]

    def __iter__(self) -> Iterator[int]:
        for chunk in self.held.chunks():
            yield from chunk

    def __contains__(self, key: SupportsIndex | bytes) -> bool:  # type: ignore[override]
        return key in bytes(self)

    def __add__(self, other: bytes) -> bytes:  # type: ignore[override]
        return bytes(self) + bytes(other)

    def __radd__(self, other: bytes) -> bytes:
        return bytes(other) + bytes(self)

    def __repr__(self) -> str:
        return f"<{self.held.nbytes} bytes of {self.label or 'a streamed export'}, on disk>"

    def _check_inside(self) -> None:
        if active() is None:
            raise StateError(
                f"{self.label or 'a constant'} ({self.held.nbytes} bytes) was streamed to disk, and this is code of "
                "ExecuTorch outside of the block, or in another thread: call to_executorch inside of "
                "streaming_constants(), in the thread that is in it, and write what it gives with "
                "stream_pack.executorch.write_program(manager, path), or by its own methods"
            )


def held_in(value: object) -> Held | None:
    """What ``value`` stands for: of a placeholder, or of any object with one in ``.held``; None for real bytes."""
    held = value if isinstance(value, Held) else getattr(value, "held", None)
    return held if isinstance(held, Held) else None


def _one(key: SupportsIndex, nbytes: int) -> tuple[int, int]:
    index = key.__index__()
    if index < 0:
        index += nbytes
    if not 0 <= index < nbytes:
        raise IndexError("index out of range")
    return index, index + 1
