"""MPSDataTypes as ExecuTorch has them: written down from its sources, and not from ours.

Source: ExecuTorch 1.4.1, backends/apple/mps: enum MPSDataType in serialization/schema.fbs, and the cases of
getMPSDataType in runtime/operations/OperationUtils.mm.
"""

from __future__ import annotations

__all__ = ["ENUM", "NUMBERS", "TAKEN"]

ENUM = {
    0: "invalid",
    1: "float16",
    2: "float32",
    3: "float64",
    4: "bfloat16",
    5: "int4",
    6: "int8",
    7: "int16",
    8: "int32",
    9: "int64",
    10: "uint4",
    11: "uint8",
    12: "uint16",
    13: "uint32",
    14: "uint64",
    15: "bool",
    16: "complex_float16",
    17: "complex_float32",
}

TAKEN = {"float16", "float32", "float64", "int4", "int8", "int16", "int32", "int64", "bool"}
"""The runtime ends the process on any other; float64 it takes for float32."""

NUMBERS = [-1, *ENUM, 18, 77]
"""All of the enum, and some that are none of it."""
