"""Exports with ExecuTorch, whose package they need (the extra ``executorch``).

- ``payloads``: payloads of single delegates, made of ExecuTorch's graphs and of tensors that are streamed into them.
- ``export``: whole exports by ExecuTorch, in which constants go to disk instead of being copied in memory.

No other package imports this one.  Importing it imports neither ExecuTorch nor torch: its
functions do, when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream_pack import _load

if TYPE_CHECKING:
    from stream_pack.executorch.export.program import write_program
    from stream_pack.executorch.export.streaming import streaming_constants
    from stream_pack.executorch.payloads.mps import build_mps_payload
    from stream_pack.executorch.payloads.xnnpack import build_xnnpack_payload

__all__ = ["build_mps_payload", "build_xnnpack_payload", "streaming_constants", "write_program"]

_MODULES = {
    "build_mps_payload": "stream_pack.executorch.payloads.mps",
    "build_xnnpack_payload": "stream_pack.executorch.payloads.xnnpack",
    "streaming_constants": "stream_pack.executorch.export.streaming",
    "write_program": "stream_pack.executorch.export.program",
}


def __getattr__(name: str) -> object:
    return _load(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return __all__
