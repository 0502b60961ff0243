"""ExecuTorch's MPSDataTypes, and what the MPS runtime does with a constant of each.

This is the only list of what it takes or refuses; the numbers are from :mod:`stream_pack.format.dtypes`.  The enum of
the same name in Metal (:mod:`stream_pack.metal.rules`) has other numbers, and types that this runtime does not read.

It is what the last release with the backend does.  An older runtime on a device may abort on more of them, on int4 and
float64 above all.

Source: ExecuTorch 1.4.1, backends/apple/mps/runtime/operations/OperationUtils.mm, MPSGraphBuilder::getMPSDataType.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stream_pack.format.dtypes import DTYPES

__all__ = ["DTYPE_OF", "MPS_TYPES", "MpsType", "Runtime"]


class Runtime(Enum):
    """What the runtime does with a constant of a type when it loads a program.

    ``READS_AS_FLOAT32``: it takes the bytes for those of float32, which has half as many.  ``ABORTS``: it ends the
    process.
    """

    READS = "reads"
    READS_AS_FLOAT32 = "reads as float32"
    ABORTS = "aborts"


@dataclass(frozen=True, slots=True)
class MpsType:
    """MPSDataType ``number``.  ``name`` and ``dtype`` are the name and number of :data:`DTYPES`'s entry."""

    number: int
    name: str
    dtype: int
    runtime: Runtime


# The cases of getMPSDataType.  All other types, and numbers outside the enum, reach its default: ET_CHECK_MSG(false).
_READ = ("float16", "float32", "int4", "int8", "int16", "int32", "int64", "bool")
_CASES = {**dict.fromkeys(_READ, Runtime.READS), "float64": Runtime.READS_AS_FLOAT32}

MPS_TYPES = {
    dtype.mps: MpsType(dtype.mps, dtype.name, row, _CASES.get(dtype.name, Runtime.ABORTS))
    for row, dtype in enumerate(DTYPES)
    if dtype.mps
}
"""The types by number: every MPSDataType but 0, ``invalid``."""

DTYPE_OF = {number: mps.dtype for number, mps in MPS_TYPES.items()}
"""MPSDataType -> number in :data:`DTYPES`."""
