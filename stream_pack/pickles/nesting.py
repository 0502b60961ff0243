"""Which of the values that a checkpoint nests are the tensors wanted.

The rule: a flat dict of tensors is taken as it is.  Of a dict of dicts, the one under a key of :data:`MODELS` is taken
if exactly one of these holds tensors; otherwise the caller has to say which (``key``), so that an optimizer's state is
never packed by accident.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stream_pack.errors import OptionError, UnsupportedCheckpointError
from stream_pack.pickles.contents import is_name
from stream_pack.pickles.state_dict import (
    Flatten,
    StateDict,
    as_tensor,
    holds_tensors,
    shown_pickled,
    what_it_is,
)
from stream_pack.pickles.tensor_names import MAX_DEPTH, NamedTensors
from stream_pack.pickles.unpickler import OddKey
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.text import MAX_LISTED, listed, quoted

__all__ = ["MODELS", "WHOLE", "Key", "choose", "flattening"]

Key: TypeAlias = "str | Sequence[str] | None"
"""Where to look: steps, or a text of steps joined by dots (a key that holds dots itself comes first); ``"."``: the
whole checkpoint; None: by the rule above."""

MAX_DIGITS = 2500
"""Digits of a number in a key: those of the largest that a pickle may hold."""

MODELS = ("state_dict", "model", "model_state_dict")
"""The keys under which training loops keep the model beside its optimizer."""

WHOLE = "."


def flattening(key: Key = None, *, ignore_unknown: bool = False, watch: MemoryWatch = UNLIMITED) -> Flatten:
    """The function that finds the tensors below ``key`` in a pickle's value.

    ``ignore_unknown``: leave out, and mention, objects that only code could rebuild, and whatever they hold.  Without
    it those below ``key`` are refused, if they are taken; elsewhere they are only mentioned.  ``watch`` limits the
    memory for names.

    Raises: OptionError for an invalid key.
    Raises (the function): UnsupportedCheckpointError, naming the tensors or keys in question; LimitError.
    """

    _check(key)

    def flatten(value: object, unknown: Collection[str]) -> StateDict:
        chosen = choose(value, key, set())
        if not isinstance(chosen.value, dict | list | tuple) or chosen.unnamed:
            subject = f"what is under {chosen.where}" if chosen.path else "the checkpoint"
            raise _refused(f"{subject} is {what_it_is(chosen.value)}", unknown)
        if chosen.nested:
            where = f"below {chosen.where} " if chosen.path else ""
            raise UnsupportedCheckpointError(
                f"this is not a flat state dict: tensors are {where}nested below "
                f"{listed(map(shown_pickled, chosen.nested), show=str)} (its keys: {_keys(chosen.value)}); choose with "
                f"--key (key=), {shown_pickled(WHOLE)} for all of it, or look at them with --list-keys"
            )
        found = NamedTensors(chosen.value, unknown, ignore_unknown=ignore_unknown, watch=watch)
        if chosen.value and not found.tensors and not found.refused:
            raise UnsupportedCheckpointError(
                f"the checkpoint holds no tensors{f' below {chosen.where}' if chosen.path else ''}; its keys: "
                f"{_keys(chosen.value)}"
            )
        remarks = (*chosen.remarks(), *found.remarks(unknown))
        return StateDict(found.tensors, found.ignored, refused=found.refused, remarks=remarks)

    return flatten


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A value of the checkpoint, and the way to it.

    ``by_rule``: chosen by the rule above, not by the caller.  ``left_out``: other keys on the way that hold tensors.
    ``nested``: keys in it that hold tensors, none of which was chosen.  ``unnamed``: its tensors would have no names.
    """

    value: object
    path: tuple[str, ...]
    by_rule: bool
    left_out: tuple[str, ...] = ()
    nested: tuple[object, ...] = ()
    unnamed: bool = False

    @property
    def where(self) -> str:
        """The way, for a message."""
        return quoted(".".join(self.path))

    def remarks(self) -> tuple[str, ...]:
        """What was decided without being asked."""
        if not self.by_rule or not self.path:
            return ()
        others = f"; skipped those under {listed(self.left_out, show=str)}" if self.left_out else ""
        return (f"using the tensors under {self.where}{others}",)


def choose(value: object, key: Key, clean: set[int]) -> Chosen:
    """The part of a pickle's value that ``key`` says, or the rule.  ``clean``: as for :func:`leaves`.

    Raises: UnsupportedCheckpointError when there is nothing under ``key``.
    """
    if key is None:
        return _by_rule(value, clean)
    path = () if key == WHOLE else _resolved(value, key) if isinstance(key, str) else tuple(key)
    found = None if path is None else _at(value, path)
    if path is None or found is None:
        text = key if isinstance(key, str) else ".".join(key)
        raise UnsupportedCheckpointError(
            f"the checkpoint has nothing under the key {shown_pickled(text)}; its keys: {_keys(value)}"
        )
    if path and as_tensor(found[0]) is not None:
        raise UnsupportedCheckpointError(
            f"the key {shown_pickled('.'.join(path))} is a single tensor: give --key (key=) its parent and "
            "select it with --include (include=)"
        )
    return Chosen(found[0], path, by_rule=False)


def _check(key: object) -> None:
    if key is None or isinstance(key, str):
        return
    if not isinstance(key, Sequence) or not all(isinstance(step, str) for step in key):
        raise OptionError(f"key={quoted(key)}: expected a string or a sequence of strings")


def _by_rule(value: object, clean: set[int]) -> Chosen:
    plain: set[int] = set()
    path: list[str] = []
    left_out: list[str] = []
    while type(value) is dict and len(path) < MAX_DEPTH:
        models = [name for name in MODELS if _holds_plainly(value.get(name), plain)]
        if len(models) != 1 or not isinstance(value[models[0]], dict | list | tuple):
            break
        left_out += map(shown_pickled, _with_tensors(value, clean, but=models[0]))
        path.append(models[0])
        value = value[models[0]]
    if type(value) is not dict:
        unnamed = not path
        return Chosen(value, tuple(path), by_rule=True, left_out=tuple(left_out), unnamed=unnamed)
    nested: Iterable[object] = (key for key, item in value.items() if _holds_plainly(item, plain))
    if path:
        # Nested modules are fine there, but a training loop may keep more than its model under this key.
        nested = (k for k in nested if k in MODELS or (type(k) is str and k.lower().startswith("optim")))
    return Chosen(value, tuple(path), by_rule=True, left_out=tuple(left_out), nested=tuple(_some(nested)))


def _holds_plainly(value: object, clean: set[int]) -> bool:
    """Whether dicts, lists and tuples alone lead to a tensor: what is inside an object cannot be chosen."""
    return holds_tensors(value, clean, inside_objects=False)


def _with_tensors(value: dict[object, object], clean: set[int], *, but: str) -> list[object]:
    """A few keys, other than ``but``, of tensors or of what holds some."""
    return _some(
        key for key, item in value.items() if key != but and (as_tensor(item) is not None or holds_tensors(item, clean))
    )


def _some(keys: Iterable[object]) -> list[object]:
    """As many as a message lists, and one more: finding them all may take long."""
    return [key for key, _ in zip(keys, range(MAX_LISTED + 1))]


def _resolved(value: object, text: str) -> tuple[str, ...] | None:
    """The steps that ``text`` means: of all ways to cut it at dots, the one with the longest first step."""
    todo: list[tuple[object, str, tuple[str, ...]]] = [(value, text, ())]
    while todo:
        here, rest, path = todo.pop()
        if len(path) > MAX_DEPTH:
            continue
        cuts = [at for at, character in enumerate(rest) if character == "."]
        for at in cuts:  # the shortest step is pushed first, and so looked at last
            found = _at(here, (rest[:at],))
            if found is not None:
                todo.append((found[0], rest[at + 1 :], (*path, rest[:at])))
        if _at(here, (rest,)) is not None:
            return (*path, rest)
    return None


def _at(value: object, path: Iterable[str]) -> tuple[object] | None:
    """What is at the end of ``path``, in a tuple; None if there is no such path."""
    for step in path:
        if type(value) is dict and step in value:
            value = value[step]
        elif type(value) is dict and (found := _under_number(value, step)) is not None:
            (value,) = found
        elif isinstance(value, list | tuple) and _is_index(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return (value,)


def _under_number(value: dict[object, object], step: str) -> tuple[object] | None:
    """What a dict holds under a number, as an optimizer numbers its parameters; in a tuple, None if there is none."""
    if not _is_index(step.removeprefix("-")) or step == "-0":
        return None
    number = int(step)
    for key in value:  # True is 1 to a dict, and large numbers are not hashed
        if is_name(key) and (key.key if isinstance(key, OddKey) else key) == number:
            return (value[key],)
    return None


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdecimal() and len(step) <= MAX_DIGITS and (step == "0" or step[0] != "0")


def _keys(value: object) -> str:
    if isinstance(value, dict):
        return listed(map(shown_pickled, value), show=str) or "none"
    if isinstance(value, list | tuple):
        return f"0 to {len(value) - 1}" if value else "none"
    return "none"


def _refused(why: str, unknown: Collection[str]) -> UnsupportedCheckpointError:
    others = [name for name in unknown if quoted(name) not in why]
    also = f" (the checkpoint also names {listed(others)})" if others else ""
    return UnsupportedCheckpointError(f"{why}{also}")
