"""Named tensors, as they are found in the value that a checkpoint's pickle describes, and words about that value.

Nothing here recurses over what a file nests, and no message grows with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stream_pack.errors import StreamPackError
from stream_pack.pickles.arrays import ARRAYS, array_of
from stream_pack.pickles.globals import Tensor, TypedStorage, Unpackable
from stream_pack.pickles.unpickler import Callee, OddKey, Opaque
from stream_pack.text import quoted, shown

__all__ = ["Flatten", "StateDict", "as_tensor", "holds_tensors", "leaves", "parts_of", "shown_pickled", "what_it_is"]


@dataclass(frozen=True, slots=True, eq=False)
class StateDict:
    """Tensors by name, in the order of the pickle; ``ignored`` counts the values beside them that are no tensors.

    ``refused``: what else has a name, and the error to raise if it is taken.  ``warnings`` and ``remarks``: what the
    user should know of how they were found.
    """

    tensors: dict[str, Tensor]
    ignored: int
    refused: Sequence[tuple[str, StreamPackError]] = ()
    warnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


Flatten: TypeAlias = "Callable[[object, Collection[str]], StateDict]"
"""From the value of a pickle, and the unknown names in it, to its tensors."""


def as_tensor(item: object) -> Tensor | Unpackable | TypedStorage | None:
    """``item`` if it is a tensor, an array, or something of torch's that holds elements; else None."""
    if isinstance(item, Tensor | Unpackable | TypedStorage):
        return item
    return array_of(item) if type(item) is Opaque and item.name in ARRAYS else None


def parts_of(item: object, *, inside_objects: bool = True) -> Iterable[object]:
    """What ``item`` holds, keys among it; nothing of what is no container."""
    if isinstance(item, dict):
        return (*item.keys(), *item.values())
    if isinstance(item, list | tuple):
        return item
    if isinstance(item, Opaque) and inside_objects:
        return item.parts
    return (item.key,) if isinstance(item, OddKey) else ()


def leaves(
    value: object, clean: set[int], seen: set[int] | None = None, *, inside_objects: bool = True
) -> Iterator[Tensor | Unpackable | TypedStorage]:
    """The tensors anywhere inside ``value``, each once; each object is looked at once.

    ``clean`` holds the ids of objects that are known to hold no tensors, and grows when there are no tensors here: the
    values of many keys may share most of what they hold.  ``seen`` is filled with the ids of all that was looked at,
    for callers that count them.  Without ``inside_objects``, what is inside an object of unknown code is not looked at;
    such calls have a ``clean`` of their own.
    """
    if id(value) in clean:
        return
    seen = set() if seen is None else seen
    seen.add(id(value))
    todo: list[object] = [value]
    found = False
    while todo:
        item = todo.pop()
        tensor = as_tensor(item)
        if tensor is not None:
            found = True
            yield tensor
            continue
        for part in parts_of(item, inside_objects=inside_objects):
            if isinstance(part, str | int | float) or id(part) in seen or id(part) in clean:
                continue
            seen.add(id(part))
            todo.append(part)
    if not found:
        clean |= seen


def holds_tensors(value: object, clean: set[int], *, inside_objects: bool = True) -> bool:
    """Whether a tensor is anywhere inside ``value``; ``clean`` and ``inside_objects`` as for :func:`leaves`."""
    if not isinstance(value, dict | list | tuple | Opaque) or as_tensor(value) is not None:
        return False
    return next(leaves(value, clean, inside_objects=inside_objects), None) is not None


def shown_pickled(value: object) -> str:
    """A value of a pickle, such as a key, in a message: short, whatever it is."""
    if isinstance(value, OddKey):
        value = value.key
    if type(value) is tuple:
        inner = ", ".join("..." if type(v) is tuple else shown_pickled(v) for v in value[:4])
        return f"({inner}{', ...' if len(value) > 4 else ''})"
    return f"<{quoted(value.name)}>" if isinstance(value, Opaque) else shown(value)


def what_it_is(value: object) -> str:
    """What is there in place of a dict of tensors, and what to do about it."""
    tensor = as_tensor(value)
    if type(tensor) is Tensor:
        return "a single tensor, which has no name: save {'name': tensor}"
    if type(tensor) is Unpackable:
        return f"a single tensor without a name, and it is {tensor.what}: {tensor.advice}"
    if type(tensor) is TypedStorage:
        return "a bare storage without a name: save {'name': tensor}"
    if isinstance(value, list | tuple):
        return (
            f"a {type(value).__name__}, whose tensors have no names: save a dict of them, or choose one of its items "
            "by number (--key 0, key=) or all of them (--key .)"
        )
    if type(value) is Opaque and any(isinstance(part, dict) and "_modules" in part for part in value.parts):
        return (
            f"a whole pickled module, {quoted(value.name)}, which only its own code could rebuild: "
            "save its state_dict() instead"
        )
    if isinstance(value, Opaque | Callee):
        return f"an object, {quoted(value.name)}: save a dict of names to tensors"
    return f"{shown_pickled(value)}, not a dict of names to tensors"
