"""What a flatbuffer says to ExecuTorch's own compiler and schemas, as JSON; and graphs of its dataclasses from that."""

from __future__ import annotations

import importlib.resources
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from executorch.exir._serialize._dataclass import _json_to_dataclass
from executorch.exir._serialize._flatbuffer import _flatc_decompile

__all__ = ["decoded", "graph_of"]


def decoded(flatbuffer: bytes, package: str) -> dict[str, Any]:
    """``flatbuffer`` by the ``schema.fbs`` of the ExecuTorch package named."""
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder, "schema.fbs")
        schema.write_bytes(importlib.resources.files(package).joinpath("schema.fbs").read_bytes())
        data = Path(folder, "graph.bin")
        data.write_bytes(flatbuffer)
        _flatc_decompile(folder, str(schema), str(data))
        text = Path(folder, "graph.json").read_text()
    # flatc writes infinities bare, which no JSON has; as the strings that ExecuTorch's dataclasses take.
    found: dict[str, Any] = json.loads(re.sub(r"(?<=[:\[,\s])([-+]?inf)(?=[\s,\]}])", r'"\1"', text))
    return found


def graph_of(text: str | dict[str, Any], cls: Any) -> Any:
    """The graph that decoded JSON describes, as ExecuTorch's dataclass."""
    return _json_to_dataclass(json.loads(text) if isinstance(text, str) else text, cls)
