"""What a user may hold, annotate or subclass has a public name: no signature leads to a class that has none."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import stream_pack

MODULES = ("executorch", "metal", "numpy", "torch")
NAMES = sorted(set(stream_pack.__all__) - {*MODULES, "__version__"})
PUBLIC = {name: getattr(stream_pack, name) for name in NAMES} | {
    f"{module}.{name}": getattr(getattr(stream_pack, module), name)
    for module in ("metal", "numpy", "torch")
    for name in getattr(stream_pack, module).__all__
}


def imported(module: ModuleType) -> dict[str, object]:
    """What a module's annotations may name: its globals, and what it imports for type checkers only."""
    known: dict[str, object] = {**vars(builtins), **vars(module)}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            for alias in node.names:
                source = importlib.import_module(node.module)
                known.setdefault(alias.asname or alias.name, getattr(source, alias.name, None))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known.setdefault(alias.asname or top, importlib.import_module(top))
    return known


def named(annotation: object, module: ModuleType) -> Iterator[object]:
    """The objects that an annotation consists of."""
    if not isinstance(annotation, str):
        yield annotation
        return
    known = imported(module)
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        if isinstance(node, ast.Name):
            yield known[node.id]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            yield known[node.value]


def private_in(annotation: object, module: ModuleType) -> Iterator[str]:
    """The classes of this package that an annotation leads to, and that have no public name."""
    for found in named(annotation, module):
        if typing.get_origin(found) is typing.Literal:
            continue
        if typing.get_args(found):  # an alias
            for argument in typing.get_args(found):
                yield from private_in(argument, module)
        elif isinstance(found, list | tuple):  # a callable's parameters
            for argument in found:
                yield from private_in(argument, module)
        elif isinstance(found, type) and found.__module__.startswith("stream_pack") and found not in PUBLIC.values():
            yield found.__qualname__


def annotated(owner: Any) -> Iterator[tuple[str, object]]:
    """Where an annotation is, and what it says."""
    if not isinstance(owner, type):
        for name, annotation in owner.__annotations__.items():
            yield name, annotation
        return
    for name, parameter in inspect.signature(owner).parameters.items():
        yield name, parameter.annotation
    for name, annotation in inspect.get_annotations(owner).items():
        if not name.startswith("_"):
            yield name, annotation
    for name, member in vars(owner).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None)
        function = function or getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith("_"):
            for argument, annotation in function.__annotations__.items():
                yield f"{name}({argument})", annotation


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_signatures_and_attributes_lead_to_public_names_only(name: str) -> None:
    owner = PUBLIC[name]
    if isinstance(owner, type) and issubclass(owner, BaseException):
        return  # the message, and attributes of builtin types
    module = sys.modules[owner.__module__]
    faults = [
        f"{where}: {private}" for where, annotation in annotated(owner) for private in private_in(annotation, module)
    ]
    assert not faults


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_says_what_it_is(name: str) -> None:
    owner = PUBLIC[name]
    assert inspect.getdoc(owner)
    assert "Initialize self" not in (inspect.getdoc(owner) or "")
