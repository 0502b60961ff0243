"""From the value that a checkpoint's pickle describes to named tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.writer.torch_globals import Tensor, TypedStorage, Unpackable
from stream_pack.writer.unpickler import Callee, OddKey, Opaque

__all__ = ["Flatten", "StateDict", "flat_state_dict"]

MAX_LISTED = 20
MAX_SHOWN = 100


@dataclass(frozen=True, slots=True, eq=False)
class StateDict:
    """Tensors by name, in the order of the pickle; ``ignored`` counts the values beside them that are no tensors."""

    tensors: dict[str, Tensor]
    ignored: int


Flatten: TypeAlias = "Callable[[object, Collection[str]], StateDict]"
"""From the value of a pickle, and the names met in it that nobody knows, to its tensors."""


def flat_state_dict(value: object, unknown: Collection[str]) -> StateDict:
    """The tensors of a flat state dict.

    ``unknown`` are the names met in the pickle that nobody knows: their presence alone is a refusal.

    Raises: UnsupportedCheckpointError for anything else, naming the tensors or keys in question.
    """
    if type(value) is not dict:
        raise _not_a_dict(value, unknown)
    tensors: dict[str, Tensor] = {}
    refused: list[str] = []
    nested: list[object] = []
    clean: set[int] = set()
    ignored = 0
    for key, item in value.items():
        if type(item) is Tensor:
            if type(key) is not str:
                raise UnsupportedCheckpointError(
                    f"a tensor stands under the key {shown(key)}: only text can name a tensor"
                )
            tensors[key] = item
        elif type(item) is Unpackable:
            refused.append(f"tensor {shown(key)} is {item.what}: {item.advice}")
        elif type(item) is TypedStorage:
            refused.append(f"{shown(key)} is a bare storage: save a tensor of it")
        elif len(nested) <= MAX_LISTED and _holds_tensors(item, clean):
            nested.append(key)
        else:
            ignored += 1
    if refused:
        raise UnsupportedCheckpointError(_listed(refused, "; ") + _also_unknown(unknown))
    if unknown:
        raise UnsupportedCheckpointError(
            "the checkpoint names objects that are no plain data, and that loading it would run code "
            f"of: {_listed(unknown)}; save a state dict of tensors only"
        )
    if nested:
        raise UnsupportedCheckpointError(
            "this is no flat state dict: tensors are nested below "
            f"{_listed(map(shown, nested))} (its keys: {_listed(map(shown, value))}); "
            "save the state dict that you want packed by itself"
        )
    if value and not tensors:
        raise UnsupportedCheckpointError(
            f"the checkpoint holds no tensors; its keys: {_listed(map(shown, value))}"
        )
    return StateDict(tensors, ignored)


def shown(value: object) -> str:
    """A key in a message: short, whatever it is, and never recursing into it."""
    if isinstance(value, OddKey):
        value = value.key
    if type(value) is tuple:
        inner = ", ".join("..." if type(v) is tuple else shown(v) for v in value[:4])
        return f"({inner}{', ...' if len(value) > 4 else ''})"
    if value is None or isinstance(value, str | bytes | bool | int | float):
        text = repr(value if not isinstance(value, str | bytes) else value[:MAX_SHOWN])
        return text if len(text) <= 2 * MAX_SHOWN else text[: 2 * MAX_SHOWN] + "..."
    return f"<{value.name[:MAX_SHOWN] if isinstance(value, Opaque) else type(value).__name__}>"


def _not_a_dict(value: object, unknown: Collection[str]) -> UnsupportedCheckpointError:
    if type(value) is Tensor:
        found = "a single tensor, which has no name: save {'name': tensor}"
    elif type(value) is Unpackable:
        found = f"a single tensor without a name, and it is {value.what}: {value.advice}"
    elif isinstance(value, list | tuple):
        found = f"a {type(value).__name__}, whose tensors have no names: save a dict of them"
    elif type(value) is Opaque and any(
        isinstance(part, dict) and "_modules" in part for part in value.parts
    ):
        return UnsupportedCheckpointError(
            f"the checkpoint is a whole pickled module, {value.name[:MAX_SHOWN]}, which only its own code could "
            "rebuild: save its state_dict() instead" + _also_unknown(unknown)
        )
    elif isinstance(value, Opaque | Callee):
        found = f"an object, {value.name[:MAX_SHOWN]}: save a dict of names to tensors"
    else:
        found = f"{shown(value)}, not a dict of names to tensors"
    return UnsupportedCheckpointError(f"the checkpoint is {found}{_also_unknown(unknown)}")


def _also_unknown(unknown: Collection[str]) -> str:
    return f" (it also names {_listed(unknown)})" if unknown else ""


def _listed(texts: Iterable[str], separator: str = ", ") -> str:
    listed = list(texts)
    more = f"{separator}and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return separator.join(text[: 10 * MAX_SHOWN] for text in listed[:MAX_LISTED]) + more


def _holds_tensors(value: object, clean: set[int]) -> bool:
    """Whether a tensor is anywhere inside; each object is looked at once, without recursion.

    ``clean`` holds the ids of all objects that are known to hold none, and grows: the values of many keys may share
    most of what they hold.
    """
    if not isinstance(value, dict | list | tuple | Opaque) or id(value) in clean:
        return False
    seen = {id(value)}
    todo: list[object] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor | Unpackable | TypedStorage):
            return True
        if isinstance(item, dict):
            inner: Iterable[object] = [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            inner = item
        elif isinstance(item, Opaque):
            inner = item.parts
        elif isinstance(item, OddKey):
            inner = (item.key,)
        else:
            continue
        for part in inner:
            if isinstance(part, str | int | float) or id(part) in seen or id(part) in clean:
                continue
            seen.add(id(part))
            todo.append(part)
    clean |= seen
    return False
