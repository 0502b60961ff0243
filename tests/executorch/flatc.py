"""What a flatbuffer says to ExecuTorch's own compiler and schemas, as JSON; and graphs of its dataclasses from that."""

from __future__ import annotations

import importlib.resources
import json
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

from executorch.exir._serialize._dataclass import _json_to_dataclass
from executorch.exir._serialize._flatbuffer import _flatc_decompile

__all__ = ["decoded", "graph_of"]


def decoded(flatbuffer: bytes, package: str) -> dict[str, Any]:
    """``flatbuffer`` by the ``schema.fbs`` of the ExecuTorch package named.

    flatc prints floats with six digits.  So it decodes once more by a schema in which they are integers.
    """
    schema = importlib.resources.files(package).joinpath("schema.fbs").read_text()
    found = _decompiled(flatbuffer, schema)
    bits = _decompiled(flatbuffer, re.sub(r"\bfloat\b", "uint", schema))
    assert not re.search(r"\bdouble\b", schema)
    exact = _with_exact_floats(found, bits)
    assert isinstance(exact, dict)
    return exact


def _decompiled(flatbuffer: bytes, schema: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        fbs = Path(folder, "schema.fbs")
        fbs.write_text(schema)
        data = Path(folder, "graph.bin")
        data.write_bytes(flatbuffer)
        _flatc_decompile(folder, str(fbs), str(data))
        text = Path(folder, "graph.json").read_text()
    # flatc writes infinities bare, which no JSON has; as the strings that ExecuTorch's dataclasses take.
    return json.loads(re.sub(r"(?<=[:\[,\s])([-+]?inf)(?=[\s,\]}])", r'"\1"', text))


def _with_exact_floats(found: Any, bits: Any) -> Any:
    """``found``, each float replaced by the one whose bits are at its place in ``bits``."""
    if isinstance(found, dict):
        return {key: _with_exact_floats(value, bits[key]) for key, value in found.items()}
    if isinstance(found, list):
        return [_with_exact_floats(*pair) for pair in zip(found, bits, strict=True)]
    if not isinstance(found, float):
        return found
    (exact,) = struct.unpack("<f", struct.pack("<I", bits))
    assert abs(exact - found) <= 1e-5 * abs(exact) + 1e-6
    return exact


def graph_of(text: str | dict[str, Any], cls: Any) -> Any:
    """The graph that decoded JSON describes, as ExecuTorch's dataclass."""
    return _json_to_dataclass(json.loads(text) if isinstance(text, str) else text, cls)
