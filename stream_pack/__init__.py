"""stream_pack: very large models from PyTorch to memory-mapped files that a GPU uses in place.

The names below are the whole public surface.  They load on first use, so that importing this
package costs nothing and ``stream-pack convert`` never imports torch.
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
    from stream_pack.inspection.inspect import inspect
    from stream_pack.inspection.inspection import (
        InspectedPart,
        InspectedPayload,
        InspectedTensor,
        Inspection,
    )
    from stream_pack.reader.damage import Damage, VerifyReport
    from stream_pack.reader.pack import Pack, open
    from stream_pack.reader.safe_open import SafeOpen, SafeSlice, load_file, safe_open
    from stream_pack.reader.verify import verify
    from stream_pack.reader.views import TensorSlice, View
    from stream_pack.report import Forecast, Report
    from stream_pack.sources.open import list_keys
    from stream_pack.sources.torch_save.outline import KeySummary
    from stream_pack.writer.convert import convert, forecast, save_file
    from stream_pack.writer.incremental import Spec, Writer
    from stream_pack.writer.parallel import ParallelWriter, Part, PartWriter
    from stream_pack.writer.sink import BinaryWriter

__all__ = [
    "Alignment",
    "AlignmentError",
    "BinaryWriter",
    "ChecksumError",
    "Damage",
    "Forecast",
    "FormatError",
    "InspectedPart",
    "InspectedPayload",
    "InspectedTensor",
    "Inspection",
    "KeySummary",
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
    "SafeOpen",
    "SafeSlice",
    "SourceChecksumError",
    "SourceError",
    "Spec",
    "StateError",
    "StreamPackError",
    "TensorSlice",
    "TensorTooLarge",
    "TrailingBytesError",
    "TruncatedError",
    "TruncatedSourceError",
    "UnknownTensorError",
    "UnsupportedCheckpointError",
    "UnsupportedDtype",
    "UnsupportedTensorError",
    "UntestedVersionError",
    "VerifyReport",
    "View",
    "Writer",
    "__version__",
    "convert",
    "executorch",
    "forecast",
    "inspect",
    "list_keys",
    "load_file",
    "metal",
    "open",
    "safe_open",
    "save_file",
    "verify",
]

_MODULES = {
    "Alignment": "stream_pack.format.align",
    "BinaryWriter": "stream_pack.writer.sink",
    "Damage": "stream_pack.reader.damage",
    "Forecast": "stream_pack.report",
    "InspectedPart": "stream_pack.inspection.inspection",
    "InspectedPayload": "stream_pack.inspection.inspection",
    "InspectedTensor": "stream_pack.inspection.inspection",
    "Inspection": "stream_pack.inspection.inspection",
    "KeySummary": "stream_pack.sources.torch_save.outline",
    "Pack": "stream_pack.reader.pack",
    "ParallelWriter": "stream_pack.writer.parallel",
    "Part": "stream_pack.writer.parallel",
    "PartWriter": "stream_pack.writer.parallel",
    "Report": "stream_pack.report",
    "SafeOpen": "stream_pack.reader.safe_open",
    "SafeSlice": "stream_pack.reader.safe_open",
    "Spec": "stream_pack.writer.incremental",
    "TensorSlice": "stream_pack.reader.views",
    "VerifyReport": "stream_pack.reader.damage",
    "View": "stream_pack.reader.views",
    "Writer": "stream_pack.writer.incremental",
    "convert": "stream_pack.writer.convert",
    "forecast": "stream_pack.writer.convert",
    "inspect": "stream_pack.inspection.inspect",
    "list_keys": "stream_pack.sources.open",
    "load_file": "stream_pack.reader.safe_open",
    "open": "stream_pack.reader.pack",
    "safe_open": "stream_pack.reader.safe_open",
    "save_file": "stream_pack.writer.convert",
    "verify": "stream_pack.reader.verify",
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
