"""Rules for casts: which dtype each tensor becomes, and what to say of rules that do nothing.

Floats of 16, 32 and 64 bits (float16, bfloat16, float32, float64) are cast into each other, and by rules with a glob
float8 is cast to these.  Everything else (integers, bools, complex, four-bit types) stays as it is, whatever a rule
says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import OptionError
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import BY_NAME, DTYPES, GGUF_TYPE_NOTE
from stream_pack.pipeline.adapt.select import matches
from stream_pack.text import counted, listed, printable, quoted, shown

__all__ = ["KEEP", "CastRule", "cast_rules", "cast_targets"]

KEEP = "keep"
"""In a rule instead of a dtype: what it matches stays as it is, whatever later rules say."""

_ALIASES = {
    "float16": ("f16", "fp16", "half"),
    "bfloat16": ("bf16",),
    "float32": ("f32", "fp32", "float"),
    "float64": ("f64", "fp64", "double"),
}
_FLOATS = tuple(BY_NAME[name] for name in _ALIASES)
_FLOAT8 = tuple(number for number, dtype in enumerate(DTYPES) if dtype.name.startswith("float8"))
_EXACT = {(BY_NAME[few], BY_NAME[many]) for few, many in (
    ("float16", "float32"), ("float16", "float64"), ("bfloat16", "float32"), ("bfloat16", "float64"),
    ("float32", "float64"),
)}  # fmt: skip
"""The casts of floats that round nothing."""
_BY_ALIAS = {alias: BY_NAME[name] for name, aliases in _ALIASES.items() for alias in (name, *aliases)}


@dataclass(frozen=True, slots=True)
class CastRule:
    """What some tensors become.

    ``pattern``: a glob over the source's names; None: all, and float8 stays as it is, because models that use it keep
    its scales beside it.  ``dtype``: the number of the dtype that floats become; None: they stay.  ``text``: the rule
    as given.
    """

    text: str = field(compare=False)
    pattern: str | None
    dtype: int | None

    @property
    def shown(self) -> str:
        """The option, for a message."""
        return f"--dtype {quoted(self.text)} (dtype=)"

    def castable(self, dtypes: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of these it applies to."""
        return np.isin(dtypes, _FLOATS if self.pattern is None else (*_FLOATS, *_FLOAT8))

    def among(self, rows: NDArray[np.intp], names: Sequence[str]) -> NDArray[np.intp]:
        """Those of these rows whose names it matches."""
        if self.pattern in (None, "*"):
            return rows
        matching = map(matches([self.pattern]), (names[row] for row in rows.tolist()))
        found: NDArray[np.intp] = rows[np.fromiter(matching, bool, len(rows))]
        return found


def cast_rules(dtype: object) -> tuple[CastRule, ...]:
    """The rules that ``dtype`` stands for: None; a dtype for all; ``DTYPE`` or ``GLOB=DTYPE`` as text, or a sequence
    of such texts; or a mapping of globs to dtypes.

    A dtype is a name such as ``"bf16"`` or ``"float32"``, a torch or NumPy dtype, or ``"keep"``.
    Raises: OptionError.
    """
    if dtype is None:
        return ()
    if isinstance(dtype, Mapping):
        return tuple(_of_pair(pattern, value) for pattern, value in dtype.items())
    if isinstance(dtype, str):
        return (_parse(dtype),)
    if isinstance(dtype, (list, tuple)):
        return tuple(_parse(text) if isinstance(text, str) else _everywhere(text) for text in dtype)
    return (_everywhere(dtype),)


def cast_targets(
    catalog: Catalog, rules: Sequence[CastRule], names: Sequence[str]
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The dtype of each tensor by the first rule that matches ``names``, one a tensor; and a warning for each rule that
    has no effect, and for scales that are rounded beside float8 that stays."""
    targets = catalog.dtypes.copy()
    undecided = np.ones(len(targets), bool)
    warnings: list[str] = []
    for rule in rules:
        rows = rule.among(np.flatnonzero(undecided & rule.castable(catalog.dtypes)), names)
        if rule.dtype is not None:
            targets[rows] = rule.dtype
        undecided[rows] = False
        if not len(rows):
            warnings += _without_effect(rule, catalog, names)
        elif rule.pattern is None:
            warnings += _rounded_scales(rule, catalog, targets, rows, names)
    return targets, tuple(warnings)


def _parse(text: str) -> CastRule:
    pattern, equals, dtype = text.rpartition("=")
    return CastRule(text, pattern if equals else None, _float_number(dtype))


def _of_pair(pattern: object, dtype: object) -> CastRule:
    if not isinstance(pattern, str):
        raise OptionError(f"dtype={{{shown(pattern)}: ...}}: expected globs, which are text, as keys")
    return CastRule(f"{pattern}={_text_of(dtype)}", pattern, _float_number(dtype))


def _everywhere(dtype: object) -> CastRule:
    return CastRule(_text_of(dtype), None, _float_number(dtype))


def _text_of(dtype: object) -> str:
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    return text.removeprefix("torch.")


def _float_number(dtype: object) -> int | None:
    text = _text_of(dtype)
    if text == KEEP:
        return None
    number = _BY_ALIAS.get(text)
    if number is None:
        raise OptionError(
            f"cannot cast to {quoted(text)}: expected one of {', '.join(_BY_ALIAS)}, or {KEEP} (no bits of other "
            "dtypes are changed)"
        )
    return number


def _without_effect(rule: CastRule, catalog: Catalog, names: Sequence[str]) -> Iterator[str]:
    """Why ``rule`` decides the dtype of no tensor."""
    rows = rule.among(np.arange(len(names)), names)
    if not len(rows):
        yield f"{rule.shown} matches none of the tensors taken: a glob must match the whole name"
        return
    castable = rule.castable(catalog.dtypes[rows])
    others = listed(_dtype_names(catalog, rows[~castable]), show=str)
    if castable.any():
        also = f", and {others} is not cast" if others else ""
        yield f"{rule.shown} is never reached: earlier rules match all of its floats{also}"
    elif rule.dtype is not None:
        float8 = bool(np.isin(catalog.dtypes[rows], _FLOAT8).any())
        advice = f"; a rule with a glob, {quoted('*=' + rule.text)}, casts float8 too" if float8 else ""
        yield f"{rule.shown} cannot apply to {others}: only floats are cast{advice}"


def _dtype_names(catalog: Catalog, rows: NDArray[np.intp]) -> list[str]:
    """What the dtypes of some tensors are called, each once: quantised ones as their source calls them."""
    wanted = set(rows.tolist())
    quantised = {row: text for row, key, text in catalog.notes if key == GGUF_TYPE_NOTE and row in wanted}
    plain = [row for row in rows.tolist() if row not in quantised]
    dtypes = np.unique(catalog.dtypes[plain]).tolist()
    return [DTYPES[number].name for number in dtypes] + [printable(text[:40]) for text in sorted({*quantised.values()})]


def _rounded_scales(
    rule: CastRule, catalog: Catalog, targets: NDArray[np.uint8], rows: NDArray[np.intp], names: Sequence[str]
) -> Iterator[str]:
    """Scales among ``rows`` that are rounded, where the float8 tensors that they belong to stay as they are."""
    float8 = [names[row] for row in np.flatnonzero(np.isin(targets, _FLOAT8)).tolist()]
    if not float8:
        return
    # layer.weight has layer.weight_scale_inv, layer.scale or layer.weight.scale.
    owners = {*float8, *(name.rpartition(".")[0] for name in float8)}
    rounded = [
        names[row]
        for row in rows.tolist()
        if _rounds(int(catalog.dtypes[row]), int(targets[row])) and _is_scale(names[row], owners)
    ]
    if rounded:
        yield (
            f"{rule.shown} leaves float8 as it is ({counted(len(float8), 'tensor')}, {listed(float8, most=1)}) but "
            f"rounds {listed(rounded, most=2)}, which seem to be its scales: "
            f"{quoted('*scale*=' + KEEP)} before it keeps them, {quoted('*=' + rule.text)} instead casts float8 too"
        )


def _rounds(source: int, target: int) -> bool:
    return source != target and (source, target) not in _EXACT


def _is_scale(name: str, owners: Collection[str]) -> bool:
    owner, _, last = name.rpartition(".")
    return "scale" in last.lower() and owner in owners
