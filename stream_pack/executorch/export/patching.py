"""Replacing functions of ExecuTorch, torch and ``copy`` during a block, for the thread that is in it.

The stand-in asks :func:`active`, and calls the original where no export is streamed.  Blocks in several threads share
the stand-ins; the last one restores the originals.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

from stream_pack.errors import UntestedVersionError
from stream_pack.executorch.export.session import active

__all__ = ["TESTED_VERSIONS", "Hook", "Patches", "Stock"]

TESTED_VERSIONS = ("1.4.1", "1.5.1")

Stock: TypeAlias = Callable[..., Any]
"""What a hook replaces, as ExecuTorch has it."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function, method or class of ExecuTorch, and what runs instead in a block.

    ``name`` is what ``module`` calls it, with a dot for a method; what another module has imported needs a hook there.
    ``replacement`` is called with the export, the original, and the caller's arguments.

    ``signature``: the original's parameters in the versions tested, without annotations; by default those of
    ``replacement`` after its first two.
    ``late``: hook it only when other code has imported the module, then or later, because importing it has effects.
    ``optional``: there are tested versions without it.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    _: KW_ONLY
    signature: str | None = None
    late: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def expected(self) -> str:
        """The signature that the original must have."""
        return self.signature or _signature(self.replacement, skipped=2)


@dataclass(slots=True, eq=False)
class _Replaced:
    owner: Any
    attribute: str
    original: Any
    stand_in: Any
    uses: int = 0

    def restore(self) -> None:
        # Other code may have replaced ours meanwhile, and restore or call it: it does nothing without a block.
        if vars(self.owner).get(self.attribute) is self.stand_in:
            setattr(self.owner, self.attribute, self.original)


_LOCK = threading.RLock()
_REPLACED: dict[tuple[str, str], _Replaced] = {}


class Patches:
    """A context manager: ``hooks`` are in place inside.  If one of them is refused, nothing is replaced.

    Raises, on entering: UntestedVersionError for a hook that is not as tested; with ``allow_untested`` this is a
    warning, and a hook that is missing is left out.  ModuleNotFoundError without ExecuTorch.
    """

    def __init__(self, hooks: Iterable[Hook], *, allow_untested: bool) -> None:
        self._waiting = list(hooks)
        self._allow_untested = allow_untested
        self._mine: list[tuple[str, str]] = []

    def __enter__(self) -> Patches:
        for hook in self._waiting:
            if not hook.late:
                _import(hook)
        self.refresh()
        return self

    def __exit__(self, *exc: object) -> None:
        with _LOCK:
            for key in reversed(self._mine):
                replaced = _REPLACED[key]
                replaced.uses -= 1
                if not replaced.uses:
                    del _REPLACED[key]
                    replaced.restore()
            self._mine = []
            self._waiting = []

    def refresh(self) -> None:
        """Hook the late ones whose modules have been imported by now."""
        if not self._waiting:
            return
        with _LOCK:
            ready = [hook for hook in self._waiting if not hook.late or hook.module in sys.modules]
            self._waiting = [hook for hook in self._waiting if hook not in ready]
            for hook in self._probe(ready):
                key = (hook.module, hook.name)
                if key not in _REPLACED:
                    _REPLACED[key] = _replace(hook)
                _REPLACED[key].uses += 1
                self._mine.append(key)

    def _probe(self, hooks: list[Hook]) -> list[Hook]:
        """Those that exist.  Refuses the others, and those that are not as tested, or warns of them."""
        found, faults = [], []
        for hook in hooks:
            fault = None if (hook.module, hook.name) in _REPLACED else _fault(hook)
            if fault != _MISSING:
                found.append(hook)
            if fault is not None and not (fault == _MISSING and hook.optional):
                faults.append(f"{hook} {fault}")
        if faults:
            message = (
                f"ExecuTorch {_version()} differs from the versions tested ({', '.join(TESTED_VERSIONS)}): "
                f"{'; '.join(faults)}"
            )
            if not self._allow_untested:
                raise UntestedVersionError(
                    f"{message}: use one of those, or try this one with allow_untested=True", faults=tuple(faults)
                )
            warnings.warn(message, stacklevel=4)
        return found


_MISSING = "is missing"


def _import(hook: Hook) -> None:
    try:
        importlib.import_module(hook.module)
    except ModuleNotFoundError as error:
        # Only a part of ExecuTorch may be missing, not all of it.
        if error.name == "executorch" or not f"{hook.module}.".startswith(f"{error.name}."):
            raise


def _owner(hook: Hook) -> tuple[Any, str] | None:
    """The object that has the hook's function as an attribute of its own, and that attribute's name."""
    owner: Any = sys.modules.get(hook.module)
    *path, attribute = hook.name.split(".")
    for step in path:
        owner = getattr(owner, step, None)
    if owner is None or attribute not in vars(owner):
        return None
    return owner, attribute


def _fault(hook: Hook) -> str | None:
    place = _owner(hook)
    if place is None:
        return _MISSING
    owner, attribute = place
    signature = _signature(getattr(owner, attribute))
    return None if signature == hook.expected else f"takes {signature}, expected {hook.expected}"


def _signature(function: Any, *, skipped: int = 0) -> str:
    """The parameters of ``function`` after the first ``skipped``, without annotations."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "an unknown signature"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in list(signature.parameters.values())[skipped:]
    ]
    return str(inspect.Signature(parameters))


def _replace(hook: Hook) -> _Replaced:
    place = _owner(hook)
    assert place is not None, f"{hook} was found a moment ago"
    owner, attribute = place
    original = vars(owner)[attribute]
    wrapped = original.__func__ if isinstance(original, staticmethod) else original
    stand_in: Any = _dispatcher(wrapped, hook.replacement)
    if isinstance(original, staticmethod):
        stand_in = staticmethod(stand_in)
    setattr(owner, attribute, stand_in)
    return _Replaced(owner, attribute, original, stand_in)


def _dispatcher(original: Stock, replacement: Callable[..., Any]) -> Stock:
    @functools.wraps(original, updated=())
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        export = active()
        if export is None:
            return original(*args, **kwargs)
        export.refresh()
        return replacement(export, original, *args, **kwargs)

    return dispatch


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("executorch")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
