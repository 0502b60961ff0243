"""What ExecuTorch sees in place of a constant's bytes.

ExecuTorch wants ``bytes``, and C code reads the memory of such an object directly.  So a placeholder is ``bytes`` whose
memory is a token.  Unequal contents have unequal tokens, so that hashing and comparing give the same results as for
the contents.  Everything that Python code can ask of it is answered for the contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex

from stream_pack.errors import StateError
from stream_pack.executorch.export.held import Held, OnDisk
from stream_pack.executorch.export.session import active

__all__ = ["HeldBytes", "held_in"]

MAGIC = b"stream_pack: a placeholder"
"""A file that has this was written by code that took a token for the contents."""


class HeldBytes(OnDisk, bytes):
    """Stands for ``held``, which messages call ``label``.

    Reading it (a slice, ``bytes()``, iterating, adding) gives the contents, from disk.  Copies: as of ordinary bytes.

    It has a length only inside a block of ``streaming_constants``, where the functions of ExecuTorch that would copy
    the bytes in C are replaced; elsewhere StateError is raised, before a token can be taken for the contents.
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
        chosen = range(self.held.nbytes)[key]
        if isinstance(chosen, int):
            return self.held.read(chosen, chosen + 1)[0]
        if chosen.step == 1:
            return self.held.read(chosen.start, chosen.stop)
        return bytes(self)[key]

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
                f"{self.label or 'a constant'} ({self.held.nbytes} bytes) was streamed to disk, and is used outside of "
                "the block, or in another thread: call to_executorch inside of streaming_constants(), in the same "
                "thread, and write its result with stream_pack.executorch.write_program(manager, path) or by its own "
                "methods"
            )


def held_in(value: object) -> Held | None:
    """What a placeholder, or another object with an attribute ``held``, stands for; None for real bytes."""
    held = value if isinstance(value, Held) else getattr(value, "held", None)
    return held if isinstance(held, Held) else None
