"""stream_pack: very large models from PyTorch to memory-mapped files that a GPU uses in place.

The names below are the whole public surface.  They load on first use, so that importing this
package costs nothing and ``python -m stream_pack convert`` never imports torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stream_pack._version import __version__

if TYPE_CHECKING:
    from stream_pack import executorch, metal
    from stream_pack.errors import (
        AlignmentError,
        ChecksumError,
        FormatError,
        LimitError,
        MappingInUse,
        MetalBufferError,
        MetalError,
        MetalUnavailable,
        NewerVersionError,
        NotAPackError,
        OptionError,
        RawPayloadError,
        SourceChecksumError,
        SourceError,
        StateError,
        StreamPackError,
        TensorTooLarge,
        TrailingBytesError,
        TruncatedError,
        TruncatedSourceError,
        UnknownTensorError,
        UnsupportedCheckpointError,
        UnsupportedDtype,
        UnsupportedTensorError,
        UntestedVersionError,
    )
    from stream_pack.format.align import Alignment
    from stream_pack.reader.pack import Pack, open
    from stream_pack.reader.safe_open import load_file, safe_open
    from stream_pack.report import Forecast, Report
    from stream_pack.writer.convert import convert, forecast, save_file
    from stream_pack.writer.incremental import Spec, Writer
    from stream_pack.writer.parallel import ParallelWriter, Part, PartWriter

__all__ = [
    "Alignment",
    "AlignmentError",
    "ChecksumError",
    "Forecast",
    "FormatError",
    "LimitError",
    "MappingInUse",
    "MetalBufferError",
    "MetalError",
    "MetalUnavailable",
    "NewerVersionError",
    "NotAPackError",
    "OptionError",
    "Pack",
    "ParallelWriter",
    "Part",
    "PartWriter",
    "RawPayloadError",
    "Report",
    "SourceChecksumError",
    "SourceError",
    "Spec",
    "StateError",
    "StreamPackError",
    "TensorTooLarge",
    "TrailingBytesError",
    "TruncatedError",
    "TruncatedSourceError",
    "UnknownTensorError",
    "UnsupportedCheckpointError",
    "UnsupportedDtype",
    "UnsupportedTensorError",
    "UntestedVersionError",
    "Writer",
    "__version__",
    "convert",
    "executorch",
    "forecast",
    "load_file",
    "metal",
    "open",
    "safe_open",
    "save_file",
]

_MODULES = {
    "Alignment": "stream_pack.format.align",
    "Forecast": "stream_pack.report",
    "Pack": "stream_pack.reader.pack",
    "ParallelWriter": "stream_pack.writer.parallel",
    "Part": "stream_pack.writer.parallel",
    "PartWriter": "stream_pack.writer.parallel",
    "Report": "stream_pack.report",
    "Spec": "stream_pack.writer.incremental",
    "Writer": "stream_pack.writer.incremental",
    "convert": "stream_pack.writer.convert",
    "forecast": "stream_pack.writer.convert",
    "load_file": "stream_pack.reader.safe_open",
    "open": "stream_pack.reader.pack",
    "safe_open": "stream_pack.reader.safe_open",
    "save_file": "stream_pack.writer.convert",
}


def __getattr__(name: str) -> object:
    if name in ("executorch", "metal"):
        return importlib.import_module(f"stream_pack.{name}")
    errors = dict.fromkeys(__all__, "stream_pack.errors")
    return _load(__name__, name, errors | _MODULES)


def _load(package: str, name: str, modules: Mapping[str, str]) -> object:
    """The attribute ``name`` of ``package``, from its module in ``modules``, which is imported by this."""
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(modules[name]), name)
    setattr(sys.modules[package], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
