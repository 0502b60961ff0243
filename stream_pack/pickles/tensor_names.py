"""Every tensor below a value of a checkpoint, under the name that the way to it gives.

Nested dicts become dotted names, and the items of lists and tuples are called by their number: ``{"a": {"b": [x]}}`` is
``a.b.0``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.pickles.globals import Tensor, TypedStorage, Unpackable
from stream_pack.pickles.state_dict import holds_tensors, leaves, shown_pickled
from stream_pack.pickles.unpickler import Opaque
from stream_pack.text import listed, quoted

__all__ = ["MAX_DEPTH", "NamedTensors"]

MAX_DEPTH = 100
"""Dicts in dicts around a tensor that is to get a name: modules nest a dozen."""
MAX_NAMES_NBYTES = 256 << 20
"""All names together, as much as a pickle may have: what is below a shared dict is named under each of its keys."""
MAX_VISITED = 8_000_000
"""Values looked at, shared ones each time: a model of a million tensors and its optimizer have four millions."""


class NamedTensors:
    """The tensors below a value, by name; ``refused`` and ``objects`` say, for messages, where the others are.

    ``clean``: as for :func:`stream_pack.pickles.state_dict.leaves`.
    """

    def __init__(self, clean: set[int]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.refused: list[str] = []
        self.objects: list[str] = []
        self.ignored = 0
        self._inside_objects = 0
        self._visited = self._names_nbytes = 0
        self._clean = clean

    def collect(self, root: dict[object, object] | list[object] | tuple[object, ...]) -> None:
        """Name every tensor below ``root``, in the order of the pickle."""
        levels = [_Level(_items(root), "", id(root), self.ignored, self._met())]
        while levels:
            level = levels[-1]
            pair = next(level.items, None)
            if pair is not None:
                self._count(values=1)
                below = self._visit(level.prefix, *pair, depth=len(levels))
                if below is not None:
                    levels.append(below)
                continue
            levels.pop()
            if levels and self._met() == level.met:
                self._clean.add(level.identity)
                self.ignored = level.ignored + 1

    def _visit(self, prefix: str, key: object, item: object, *, depth: int) -> _Level | None:
        """Take ``item`` if it is a tensor; what it nests is returned, to be visited next."""
        if isinstance(item, Tensor | Unpackable | TypedStorage):
            name = self._name(prefix, key)
            self._count(name_nbytes=len(name) + 1)
            self._take(name, item)
        elif isinstance(item, Opaque):
            self._look_inside(item, _path(prefix, key))
        elif not isinstance(item, dict | list | tuple) or id(item) in self._clean:
            self.ignored += 1
        elif type(key) is str and depth < MAX_DEPTH:
            below = f"{prefix}{key}."
            self._count(name_nbytes=len(below))
            return _Level(_items(item), below, id(item), self.ignored, self._met())
        elif holds_tensors(item, self._clean):
            self._name(prefix, key)
            raise UnsupportedCheckpointError(
                f"tensors are nested more than {MAX_DEPTH} levels deep, below {quoted(prefix[:-1])}: choose a part of "
                "the checkpoint with --key (key=)"
            )
        else:
            self.ignored += 1
        return None

    def _look_inside(self, item: Opaque, path: str) -> None:
        """Count the tensors inside an object: they cannot be named."""
        seen: set[int] = set()
        inside = sum(1 for _ in leaves(item, self._clean, seen))
        self._count(values=len(seen))
        self._inside_objects += inside
        if inside:
            self.objects.append(f"{path} (a {quoted(item.name)})")
        else:
            self.ignored += 1

    def _count(self, *, values: int = 0, name_nbytes: int = 0) -> None:
        self._visited += values
        self._names_nbytes += name_nbytes
        if self._visited > MAX_VISITED:
            raise UnsupportedCheckpointError(
                f"the checkpoint nests more than {MAX_VISITED} values: choose a part of it with --key (key=)"
            )
        if self._names_nbytes > MAX_NAMES_NBYTES:
            raise UnsupportedCheckpointError(
                f"the names of the tensors take more than {MAX_NAMES_NBYTES} bytes: choose a part of the checkpoint "
                "with --key (key=)"
            )

    def remarks(self, unknown: Collection[str]) -> Iterator[str]:
        """What was left out."""
        if self.ignored:
            yield f"skipped values that are not tensors: {self.ignored}"
        if unknown or self.objects:
            inside = self._inside_objects
            tensors = f", and the tensors inside them ({inside})" if inside else ""
            yield (
                f"objects that need code to load were skipped{tensors}: "
                f"{listed(unknown) if unknown else listed(self.objects, show=str)}"
            )

    def _met(self) -> int:
        return len(self.tensors) + len(self.refused) + len(self.objects)

    def _take(self, name: str, item: object) -> None:
        if type(item) is Tensor:
            if name in self.tensors:
                raise UnsupportedCheckpointError(
                    f"two tensors are named {shown_pickled(name)}: one under a key that holds a dot, the other nested; "
                    "choose a part of the checkpoint with --key (key=)"
                )
            self.tensors[name] = item
        elif type(item) is Unpackable:
            self.refused.append(f"tensor {shown_pickled(name)} is {item.what}: {item.advice}")
        else:
            self.refused.append(f"{shown_pickled(name)} is a bare storage: save a tensor of it")

    def _name(self, prefix: str, key: object) -> str:
        if type(key) is not str:
            below = f" below {quoted(prefix[:-1])}" if prefix else ""
            raise UnsupportedCheckpointError(
                f"a tensor is under the key {shown_pickled(key)}{below}: only text can name a tensor"
            )
        return prefix + key


@dataclass(slots=True)
class _Level:
    """A dict or list that is being looked through; ``ignored`` and ``met``: the counts before it."""

    items: Iterator[tuple[object, object]]
    prefix: str
    identity: int
    ignored: int
    met: int


def _items(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict):
        return iter(value.items())
    assert isinstance(value, list | tuple)
    return ((str(number), item) for number, item in enumerate(value))


def _path(prefix: str, key: object) -> str:
    return shown_pickled(f"{prefix}{key}") if type(key) is str else f"{shown_pickled(prefix)} / {shown_pickled(key)}"
