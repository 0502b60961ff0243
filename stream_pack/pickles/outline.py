"""The keys of a checkpoint that hold tensors, for the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.pickles.globals import Storage, Tensor, TypedStorage
from stream_pack.pickles.nesting import choose
from stream_pack.pickles.state_dict import as_tensor, leaves, shown_pickled
from stream_pack.pickles.unpickler import Opaque

__all__ = ["KeySummary", "outline"]

MAX_STEPS = 2
MAX_ROWS = 1000
MAX_VISITED = 8_000_000
"""Values looked at, shared ones each time."""


@dataclass(frozen=True, slots=True)
class KeySummary:
    """A key of a checkpoint under which there are tensors.

    ``path``: the keys that lead there from the top, () for the whole checkpoint; a key that is not text is only
    described.  ``kind``: ``"dict"``, ``"list"``, ``"tuple"``, or the class of an object, whose tensors cannot be
    chosen.  ``tensors``: how many are anywhere below.  ``nbytes``: bytes of the storages that they use, each counted
    once.  ``chosen``: whether :func:`stream_pack.convert` takes it by default.
    """

    path: tuple[str, ...]
    kind: str
    tensors: int
    nbytes: int
    chosen: bool


def outline(value: object) -> list[KeySummary]:
    """What the value of a pickle holds, down to keys of keys; at most 1,000 rows.

    Raises: UnsupportedCheckpointError when values are shared so often that looking at all of them would not end.
    """
    chosen = choose(value, None, set())
    taken = None if chosen.nested or chosen.unnamed else chosen.path
    clean: set[int] = set()
    rows = []
    visited = 0
    for path, item in _walk(value):
        seen: set[int] = set()
        found = list(leaves(item, clean, seen)) if isinstance(item, dict | list | tuple | Opaque) else []
        visited += 1 + len(seen)
        if visited > MAX_VISITED:
            raise UnsupportedCheckpointError("the checkpoint shares its values too often to be listed")
        if found or not path:
            nbytes = sum(storage.nbytes for storage in _storages(found))
            kind = item.name if isinstance(item, Opaque) else type(item).__name__
            rows.append(KeySummary(path, kind, len(found), nbytes, path == taken))
        if len(rows) == MAX_ROWS:
            break
    return rows


def _walk(value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    todo: list[tuple[tuple[str, ...], object]] = [((), value)]
    while todo:
        path, item = todo.pop()
        yield path, item
        if len(path) == MAX_STEPS:
            continue
        if isinstance(item, dict):
            inner: Iterable[tuple[object, object]] = item.items()
        elif isinstance(item, list | tuple):
            inner = ((str(number), part) for number, part in enumerate(item))
        else:
            continue
        below = [
            ((*path, key if type(key) is str else shown_pickled(key)), part)
            for key, part in inner
            if isinstance(part, dict | list | tuple | Opaque) and as_tensor(part) is None
        ]
        todo.extend(reversed(below))


def _storages(found: Iterable[object]) -> Iterable[Storage]:
    storages = (item.storage for item in found if isinstance(item, Tensor | TypedStorage))
    return dict.fromkeys(storages)
