"""Every tensor below a value of a checkpoint, under the name that the way to it gives.

Nested dicts become dotted names.  Items of lists and tuples, and what a dict holds under a number, are called by the
number: ``{"a": {"b": [x]}}`` is ``a.b.0``, the state of an optimizer ``state.0.exp_avg``.

What has a name and cannot be packed is refused only if it is taken, so it is listed with the error to raise then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from stream_pack.errors import SourceError, UnsupportedCheckpointError, UnsupportedTensorError
from stream_pack.pickles.arrays import MACHINERY
from stream_pack.pickles.contents import Contents, Nested, is_name, items_of, name_of
from stream_pack.pickles.globals import Tensor, TypedStorage, Unpackable
from stream_pack.pickles.state_dict import as_tensor, shown_pickled
from stream_pack.pickles.unpickler import Opaque
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.text import listed, quoted

__all__ = ["MAX_DEPTH", "NamedTensors"]

MAX_DEPTH = 100
"""Containers around a tensor that is to get a name: modules nest a dozen."""
MAX_NAMES_NBYTES = 256 << 20
"""All names together, as much as a pickle may have: what is below a shared dict is named under each of its keys."""
MAX_VISITED = 8_000_000
"""Values looked at, shared ones each time: a model of a million tensors and its optimizer have four millions."""
NAME_NBYTES = 200
"""Memory for a name beside its characters: the text, its place in a dict, and an error where it is refused."""


CHOOSE = "choose a part of the checkpoint with --key (key=); excluding tensors does not help"


class NamedTensors:
    """The tensors below ``root``, by name; ``refused`` holds what else has a name, with the error that taking it is.

    ``ignore_unknown``: objects that hold tensors or need code are left out instead; the names of that code are
    ``unknown``.  ``met``: those of them that were found below ``root``.

    Raises: UnsupportedCheckpointError when there are too many names, or they are too long or nested too deeply;
    LimitError when ``watch`` has no memory for them.
    """

    def __init__(
        self, root: Nested, unknown: Collection[str], *, ignore_unknown: bool, watch: MemoryWatch = UNLIMITED
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.refused: list[tuple[str, SourceError]] = []
        self.met: dict[str, None] = {}
        self.ignored = 0
        self._ignore_unknown = ignore_unknown
        self._objects: list[tuple[str, Opaque]] = []
        self._inside_objects = 0
        self._contents = Contents(unknown, watch=watch)
        self._check(root, watch)
        self._collect(root)
        if not ignore_unknown:
            self._refuse_objects()

    def _check(self, root: Nested, watch: MemoryWatch) -> None:
        """Refuse to make more names than there may be, before the first is made."""
        below = self._contents.below(root)
        if below.height > MAX_DEPTH:
            raise UnsupportedCheckpointError(
                f"tensors are nested more than {MAX_DEPTH} levels deep, below {quoted(self._deepest(root))}: choose a "
                "part of the checkpoint with --key (key=); excluding them does not help"
            )
        if below.name_nbytes > MAX_NAMES_NBYTES:
            raise UnsupportedCheckpointError(
                f"the names of the tensors take more than {MAX_NAMES_NBYTES} bytes: {CHOOSE}"
            )
        if below.values > MAX_VISITED:
            raise UnsupportedCheckpointError(f"the checkpoint nests more than {MAX_VISITED} values: {CHOOSE}")
        watch.allow(below.names * NAME_NBYTES + below.name_nbytes)

    def _deepest(self, root: Nested) -> str:
        """The way to what is nested deepest, as far as names may go."""
        steps: list[str] = []
        while len(steps) < MAX_DEPTH - 1:
            inner = [(key, item) for key, item in items_of(root) if isinstance(item, dict | list | tuple)]
            key, root = max(inner, key=lambda pair: self._contents.below(pair[1]).height)
            steps.append(name_of(key))
        return ".".join(steps)

    def _collect(self, root: Nested) -> None:
        levels = [_Level(items_of(root), "")]
        while levels:
            level = levels[-1]
            pair = next(level.items, None)
            if pair is None:
                levels.pop()
                continue
            below = self._visit(level, *pair)
            if below is not None:
                levels.append(below)

    def _visit(self, level: _Level, key: object, item: object) -> _Level | None:
        """Take ``item`` if it is a tensor; what it nests is returned, to be visited next."""
        if isinstance(item, dict | list | tuple):
            if self._contents.below(item).names:
                return _Level(items_of(item), f"{level.prefix}{name_of(key)}.", level.unnamed or _unnamed(level, key))
        elif (tensor := as_tensor(item)) is not None:
            self._take(level.prefix + name_of(key), tensor, level.unnamed or _unnamed(level, key))
            return None
        elif isinstance(item, Opaque) and (found := self._contents.object(item)):
            self.met.update(dict.fromkeys(found.unknown))
            self._objects.append((level.prefix + name_of(key), item))
            self._inside_objects += found.tensors
            self.ignored += self._ignore_unknown and not found.tensors
            return None
        self.ignored += 1
        return None

    def _take(
        self, name: str, item: Tensor | Unpackable | TypedStorage, unnamed: UnsupportedCheckpointError | None
    ) -> None:
        if unnamed is not None:
            self.refused.append((name, unnamed))
        elif type(item) is Unpackable:
            what = f"tensor {shown_pickled(name)} is {item.what}: {item.advice}"
            self.refused.append((name, UnsupportedTensorError(what, tensor=name)))
        elif type(item) is not Tensor:
            error = UnsupportedCheckpointError(f"{shown_pickled(name)} is a bare storage: save a tensor of it")
            self.refused.append((name, error))
        elif name in self.tensors:
            error = UnsupportedCheckpointError(
                f"two tensors are named {shown_pickled(name)}, because a key holds a dot, or a number and its text are "
                "keys of one dict: choose a part of the checkpoint with --key (key=)"
            )
            self.refused.append((name, error))
        else:
            self.tensors[name] = item

    def _refuse_objects(self) -> None:
        """One error for all objects that need code, and one for the others that hold tensors."""
        code = UnsupportedCheckpointError(
            f"loading the checkpoint would run code, because it names {listed(self.met)} (under "
            f"{listed(self._coded(), show=str)}); leave them out with --ignore-unknown (ignore_unknown=True), or save "
            "a state dict of tensors only"
        )
        holders = UnsupportedCheckpointError(
            f"tensors are inside objects other than dicts, lists and tuples: below {self._listed_objects()}; leave "
            "them out with --ignore-unknown (ignore_unknown=True), or save them under names of their own"
        )
        for name, item in self._objects:
            self.refused.append((name, code if self._contents.object(item).unknown else holders))

    def _coded(self) -> list[str]:
        """Where the objects that need code are."""
        return [shown_pickled(name) for name, item in self._objects if self._contents.object(item).unknown]

    def _listed_objects(self) -> str:
        texts = (f"{shown_pickled(name)} (a {quoted(item.name)})" for name, item in self._objects)
        return listed(texts, total=len(self._objects), show=str)

    def remarks(self, unknown: Collection[str]) -> Iterator[str]:
        """What was left out; ``unknown``: the names of code in the whole pickle."""
        if self.ignored:
            yield f"skipped values that are not tensors: {self.ignored}"
        if not self._ignore_unknown:
            outside = [name for name in self._needing_code(unknown) if name not in self.met]
            if outside:
                yield f"skipped objects that need code to load, none of them among these tensors: {listed(outside)}"
        elif (code := self._needing_code(unknown)) or self._objects:
            inside = self._inside_objects
            tensors = f", and the tensors inside them ({inside})" if inside else ""
            yield (
                f"objects that need code to load were skipped{tensors}: "
                f"{listed(code) if code else self._listed_objects()}"
            )

    def _needing_code(self, unknown: Collection[str]) -> list[str]:
        """The names that are not just those of arrays."""
        return [name for name in unknown if name in self.met or name not in MACHINERY]


@dataclass(slots=True)
class _Level:
    """A container that is being looked through; ``unnamed``: the error of taking a tensor there, if it has no name."""

    items: Iterator[tuple[object, object]]
    prefix: str
    unnamed: UnsupportedCheckpointError | None = None


def _unnamed(level: _Level, key: object) -> UnsupportedCheckpointError | None:
    """What to raise for a tensor below ``key``, if that cannot be a part of its name."""
    if is_name(key):
        return None
    below = f" below {quoted(level.prefix[:-1])}" if level.prefix else ""
    return UnsupportedCheckpointError(
        f"a tensor is under the key {shown_pickled(key)}{below}: only text or an integer can name a tensor"
    )
