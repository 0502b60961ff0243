"""The result of a comparison: what one of two files has and the other has not, or has otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from stream_pack.text import counted, human_nbytes, listed, printable

__all__ = ["ChangedTensor", "Difference", "ValueDifference"]


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How far the elements of two float tensors of one shape are apart.

    ``elements``: how many are not equal; NaN equals NaN here.  ``largest``: the largest absolute difference;
    ``largest_relative``: the largest one divided by the larger of both magnitudes; both among elements that are finite
    in both.  ``not_finite``: how many of the unequal elements are infinite or NaN in one of them, at least.
    """

    elements: int
    largest: float
    largest_relative: float
    not_finite: int


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor that both have, and not alike: pairs are (of the first, of the second).

    ``ranges``: where their bytes differ, as half-open ranges of whole blocks, if both have as many bytes; None if not.
    ``values``: if they were asked for, and both are floats of one shape.

    Units: bytes, from the tensor's first.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: tuple[int, int]
    ranges: tuple[tuple[int, int], ...] | None
    values: ValueDifference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What :func:`stream_pack.diff` says.

    ``removed``: only the first has them; ``added``: only the second; ``renamed``: pairs of names of which the first has
    the one and the second the other, with the same bytes, dtype and shape.  ``same``: how many tensors are alike under
    one name.  ``metadata``: the keys under which both have different texts, or one has none; such a difference alone
    does not make :attr:`equal` false.  ``block_nbytes``: the length of the blocks that were compared; ``read_nbytes``:
    bytes of tensors that were read for it, 0 where the checksums of both packs said enough.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    changed: tuple[ChangedTensor, ...]
    same: int
    metadata: tuple[str, ...]
    block_nbytes: int
    read_nbytes: int

    @property
    def equal(self) -> bool:
        """Whether both have the same tensors under the same names."""
        return not (self.added or self.removed or self.renamed or self.changed)

    def to_json(self) -> dict[str, object]:
        """All fields, ``schema`` (1) and ``equal``."""
        return {"schema": 1, "equal": self.equal, **asdict(self)}

    def to_text(self) -> str:
        """A line for each difference, and one for all."""
        return "\n".join(_lines(self))


def _lines(difference: Difference) -> Iterator[str]:
    yield from (f"- {printable(name)}" for name in difference.removed)
    yield from (f"+ {printable(name)}" for name in difference.added)
    yield from (f"> {printable(old)} -> {printable(new)}" for old, new in difference.renamed)
    for tensor in difference.changed:
        yield f"! {printable(tensor.name)}: {', '.join(_changes(tensor))}"
    if difference.metadata:
        yield f"metadata differs: {listed(difference.metadata)}"
    if difference.equal:
        yield f"no difference: {counted(difference.same, 'tensor')}"
        return
    counts = (
        (len(difference.removed), "removed"),
        (len(difference.added), "added"),
        (len(difference.renamed), "renamed"),
        (len(difference.changed), "changed"),
        (difference.same, "the same"),
    )
    yield ", ".join(f"{count} {what}" for count, what in counts if count)


def _changes(tensor: ChangedTensor) -> Iterator[str]:
    for old, new in (tensor.dtypes, tensor.shapes):
        if old != new:
            yield f"{_shown(old)} -> {_shown(new)}"
    if tensor.ranges is None:
        yield f"{tensor.nbytes[0]} -> {tensor.nbytes[1]} bytes"
    elif tensor.ranges:
        differing = sum(end - begin for begin, end in tensor.ranges)
        first = tensor.ranges[0]
        more = f" and {len(tensor.ranges) - 1} more ranges" if len(tensor.ranges) > 1 else ""
        total = human_nbytes(tensor.nbytes[0])
        yield f"blocks of {human_nbytes(differing)} of {total} differ: bytes {first[0]} to {first[1]}{more}"
    if tensor.values is not None:
        yield f"{counted(tensor.values.elements, 'element')} by up to {tensor.values.largest:.3g}"
        yield f"relative {tensor.values.largest_relative:.3g}"
        if tensor.values.not_finite:
            yield f"{tensor.values.not_finite} of them not finite"


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
