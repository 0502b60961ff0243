"""What a part of a pickle's value holds, counted before anything is named, each container once.

A shared dict is named under each of its keys, so a few bytes of pickle can ask for more names than there are atoms;
:class:`Contents` knows how many, and how long they are, in the time that it takes to see every container once.

Nothing here recurses over what a file nests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.pickles.state_dict import as_tensor, parts_of, shown_pickled
from stream_pack.pickles.unpickler import OddKey, Opaque
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch

__all__ = ["MAX_LOOKED_AT", "Below", "Contents", "Nested", "Object", "is_name", "items_of", "name_of"]

Nested: TypeAlias = "dict[object, object] | list[object] | tuple[object, ...]"

MAX_LOOKED_AT = 8_000_000
"""Values inside objects, shared ones each time: a model of a million tensors and its optimizer have four millions."""

MOST = 2**63
"""No count goes on above it: that of a chain of dicts, each twice in the next, has as many bits as there are dicts."""


SMALL = 8
"""Items of a container that is counted again each time it is met, if it holds no other: the state of a parameter."""

STEP = 4096
"""Containers counted before memory is looked at again: they take 1 MB."""


@dataclass(frozen=True, slots=True)
class Below:
    """What is below a dict, list or tuple, over all ways to it.

    ``names``: tensors, and objects that hold some or need code.  ``name_nbytes``: the characters of their names, as
    seen from here.  ``values``: those that are looked at to find them.  ``height``: containers around the deepest one,
    this one included.
    """

    names: int
    name_nbytes: int
    values: int
    height: int


NOTHING = Below(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Object:
    """What is inside an object that is no container: ``tensors``, and the ``unknown`` names of code in it."""

    tensors: int
    unknown: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.tensors or self.unknown)


_NO_OBJECT = Object(0, ())


@dataclass(slots=True)
class _Level:
    """A container that is being counted; ``key``: of the one in it that is counted first."""

    value: Nested
    items: Iterator[tuple[object, object]]
    key: object = None
    leaf: bool = True
    names: int = 0
    name_nbytes: int = 0
    values: int = 0
    height: int = 0

    def add(self, key: object, found: Below) -> None:
        """Count what is under ``key``, which is a part of each of its names, and the dots after it."""
        self.leaf = False
        if found.names:
            self.values = min(MOST, self.values + found.values)
            self.height = max(self.height, found.height)
            self.add_names(found.names, found.name_nbytes + found.names * (len(name_of(key)) + 1))

    def add_names(self, names: int, nbytes: int) -> None:
        self.names = min(MOST, self.names + names)
        self.name_nbytes = min(MOST, self.name_nbytes + nbytes)

    def below(self) -> Below:
        if not self.names:
            return NOTHING
        return Below(self.names, self.name_nbytes, self.values + len(self.value), self.height + 1)


class Contents:
    """What every container below some value holds; ``unknown``: the names in the pickle that only code could rebuild.

    Memory: about 300 bytes for each container but the small ones that hold no others, which ``watch`` limits.
    """

    def __init__(self, unknown: Collection[str], *, watch: MemoryWatch = UNLIMITED) -> None:
        self._unknown = frozenset(unknown)
        self._watch = watch
        self._below: dict[int, Below] = {}
        self._objects: dict[int, Object] = {}
        self._clean: set[int] = set()
        self._looked_at = 0

    def below(self, value: Nested) -> Below:
        """What is below ``value``.

        Raises: UnsupportedCheckpointError for a container around a tensor that holds itself.
        """
        found = self._below.get(id(value))
        return self._count(value) if found is None else found

    def object(self, item: Opaque) -> Object:
        """What is inside ``item``, which is looked through once."""
        found = self._objects.get(id(item))
        if found is None:
            found = self._objects[id(item)] = self._look_inside(item)
        return found

    def _count(self, root: Nested) -> Below:
        levels = [_Level(root, items_of(root))]
        open_: set[int] = {id(root)}
        holders: set[int] = set()
        while True:
            level = levels[-1]
            inner = self._add_items(level, open_, holders)
            if inner is not None:
                open_.add(id(inner))
                levels.append(_Level(inner, items_of(inner)))
                continue
            levels.pop()
            open_.discard(id(level.value))
            found = level.below()
            if found.names and id(level.value) in holders:
                raise UnsupportedCheckpointError(
                    "a container around tensors holds itself, so they are nested without end: choose a part of the "
                    "checkpoint with --key (key=); excluding them does not help"
                )
            if not level.leaf or len(level.value) > SMALL:
                self._keep(level.value, found)
            if not levels:
                return found
            levels[-1].add(levels[-1].key, found)

    def _keep(self, value: Nested, found: Below) -> None:
        self._below[id(value)] = found
        if len(self._below) % STEP == 0:
            self._watch.allow(0)

    def _add_items(self, level: _Level, open_: set[int], holders: set[int]) -> Nested | None:
        """Count the next items, up to one that has to be counted first."""
        for key, item in level.items:
            if isinstance(item, dict | list | tuple):
                found = self._below.get(id(item))
                if found is not None:
                    level.add(key, found)
                elif id(item) in open_:
                    holders.add(id(item))
                else:
                    level.key = key
                    return item
            elif as_tensor(item) is not None or (isinstance(item, Opaque) and self.object(item)):
                level.add_names(1, len(name_of(key)))
        return None

    def _look_inside(self, item: Opaque) -> Object:
        seen = {id(item)}
        todo: list[object] = [item]
        tensors = 0
        unknown: dict[str, None] = {}
        while todo:
            part = todo.pop()
            if as_tensor(part) is not None:
                tensors += 1
                continue
            if isinstance(part, Opaque) and part.name in self._unknown:
                unknown[part.name] = None
            for inner in parts_of(part):
                if isinstance(inner, str | int | float) or id(inner) in seen or id(inner) in self._clean:
                    continue
                seen.add(id(inner))
                todo.append(inner)
        if not tensors and not unknown:
            self._clean |= seen
            return _NO_OBJECT
        self._looked_at += len(seen)
        if self._looked_at > MAX_LOOKED_AT:
            raise UnsupportedCheckpointError(
                f"the checkpoint nests more than {MAX_LOOKED_AT} values inside objects: choose a part of it with "
                "--key (key=)"
            )
        return Object(tensors, tuple(unknown))


def is_name(key: object) -> bool:
    """Whether ``key`` can be a part of a tensor's name: text, or a number as a list has them."""
    return type(key) is str or type(key) is int or (isinstance(key, OddKey) and type(key.key) is int)


def name_of(key: object) -> str:
    """The part of a name that ``key`` gives; of one that cannot, what to call it."""
    if type(key) is str:
        return key
    if isinstance(key, OddKey):
        key = key.key
    return str(key) if type(key) is int else shown_pickled(key)


def items_of(value: Nested) -> Iterator[tuple[object, object]]:
    """The values in a container, by their keys or numbers."""
    return iter(value.items()) if isinstance(value, dict) else enumerate(value)
