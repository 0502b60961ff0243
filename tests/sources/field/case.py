"""One kind of checkpoint: how to make it, and what has to become of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.torch_zips import saved

__all__ = ["Build", "Case", "Tensors", "packed", "refused"]

Build = Callable[[], bytes]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """``what`` is how a person would call it.  ``tensors``: what the pack has to hold; None: it is refused, with a
    message that ``refusal`` matches.  ``options``: of the conversion.  ``steps``: what the pipes give at once.
    """

    what: str
    build: Build
    tensors: Callable[[], Tensors] | None = None
    refusal: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, ...] = (65536, 1)


def packed(what: str, tensors: Callable[[], Tensors], build: Build | None = None, **options: Any) -> Case:
    """A checkpoint of these tensors; without ``build`` as ``torch.save`` writes them."""
    return Case(what, build or (lambda: saved(tensors())), tensors, options=options)


def refused(what: str, build: Build, refusal: str, *, steps: tuple[int, ...] = (65536, 1), **options: Any) -> Case:
    """A checkpoint that must not become a pack."""
    return Case(what, build, refusal=refusal, options=options, steps=steps)
