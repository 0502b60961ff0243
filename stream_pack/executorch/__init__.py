"""What speaks to ExecuTorch, and needs its package: the extra ``executorch``.

Importing this module imports neither ExecuTorch nor torch; what is called does, when it needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stream_pack.executorch.export.program import write_program
    from stream_pack.executorch.export.streaming import streaming_constants
    from stream_pack.executorch.payloads.mps import build_mps_payload
    from stream_pack.executorch.payloads.xnnpack import build_xnnpack_payload

__all__ = [
    "build_mps_payload",
    "build_xnnpack_payload",
    "streaming_constants",
    "write_program",
]

_MODULES = {
    "build_mps_payload": "payloads.mps",
    "build_xnnpack_payload": "payloads.xnnpack",
    "streaming_constants": "export.streaming",
    "write_program": "export.program",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
