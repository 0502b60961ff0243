"""stream_pack: very large models from PyTorch to memory-mapped files that a GPU uses in place.

The names below, and those that :mod:`stream_pack.torch`, :mod:`stream_pack.numpy`, :mod:`stream_pack.metal` and
:mod:`stream_pack.executorch` list, are the whole public surface.  All but the errors load on first use: importing this
package is quick, and torch is imported only where torch objects are given or taken.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stream_pack import errors
from stream_pack._version import __version__
from stream_pack.errors import *  # noqa: F403

if TYPE_CHECKING:
    from stream_pack import executorch, metal, numpy, torch
    from stream_pack.extraction.extract import extract, forecast_extract
    from stream_pack.extraction.report import ExtractedFile, ExtractForecast, ExtractReport
    from stream_pack.format.align import Alignment
    from stream_pack.inspection.diff import diff
    from stream_pack.inspection.difference import ChangedTensor, Difference, ValueDifference
    from stream_pack.inspection.inspect import inspect
    from stream_pack.inspection.inspection import (
        InspectedFile,
        InspectedPart,
        InspectedPayload,
        InspectedTensor,
        Inspection,
        RefusedTensor,
    )
    from stream_pack.pickles.outline import KeySummary
    from stream_pack.reader.damage import Damage, VerifyReport
    from stream_pack.reader.pack import Pack, open
    from stream_pack.reader.safe_open import SafeOpen, SafeSlice, load_file, safe_open
    from stream_pack.reader.verify import verify
    from stream_pack.reader.views import TensorSlice, View
    from stream_pack.sources.open import list_keys
    from stream_pack.writer.convert import convert, forecast, save_file
    from stream_pack.writer.incremental import Spec, Writer
    from stream_pack.writer.parallel import ParallelWriter, Part, PartWriter
    from stream_pack.writer.report import Forecast, Report, Sizes
    from stream_pack.writer.sink import BinaryWriter

__all__ = [
    "Alignment",
    "BinaryWriter",
    "ChangedTensor",
    "Damage",
    "Difference",
    "ExtractForecast",
    "ExtractReport",
    "ExtractedFile",
    "Forecast",
    "InspectedFile",
    "InspectedPart",
    "InspectedPayload",
    "InspectedTensor",
    "Inspection",
    "KeySummary",
    "Pack",
    "ParallelWriter",
    "Part",
    "PartWriter",
    "RefusedTensor",
    "Report",
    "SafeOpen",
    "SafeSlice",
    "Sizes",
    "Spec",
    "TensorSlice",
    "ValueDifference",
    "VerifyReport",
    "View",
    "Writer",
    "__version__",
    "convert",
    "diff",
    "executorch",
    "extract",
    "forecast",
    "forecast_extract",
    "inspect",
    "list_keys",
    "load_file",
    "metal",
    "numpy",
    "open",
    "safe_open",
    "save_file",
    "torch",
    "verify",
]
__all__ += errors.__all__
__all__.sort()

_NAMES = {
    "stream_pack.extraction.extract": ("extract", "forecast_extract"),
    "stream_pack.extraction.report": ("ExtractForecast", "ExtractReport", "ExtractedFile"),
    "stream_pack.format.align": ("Alignment",),
    "stream_pack.inspection.diff": ("diff",),
    "stream_pack.inspection.difference": ("ChangedTensor", "Difference", "ValueDifference"),
    "stream_pack.inspection.inspect": ("inspect",),
    "stream_pack.inspection.inspection": (
        "InspectedFile",
        "InspectedPart",
        "InspectedPayload",
        "InspectedTensor",
        "Inspection",
        "RefusedTensor",
    ),
    "stream_pack.reader.damage": ("Damage", "VerifyReport"),
    "stream_pack.reader.pack": ("Pack", "open"),
    "stream_pack.reader.safe_open": ("SafeOpen", "SafeSlice", "load_file", "safe_open"),
    "stream_pack.reader.verify": ("verify",),
    "stream_pack.reader.views": ("TensorSlice", "View"),
    "stream_pack.writer.report": ("Forecast", "Report", "Sizes"),
    "stream_pack.sources.open": ("list_keys",),
    "stream_pack.pickles.outline": ("KeySummary",),
    "stream_pack.writer.convert": ("convert", "forecast", "save_file"),
    "stream_pack.writer.incremental": ("Spec", "Writer"),
    "stream_pack.writer.parallel": ("ParallelWriter", "Part", "PartWriter"),
    "stream_pack.writer.sink": ("BinaryWriter",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in ("executorch", "metal", "numpy", "torch"):
        return importlib.import_module(f"stream_pack.{name}")
    return _load(__name__, name, _MODULES)


def _load(package: str, name: str, modules: Mapping[str, str]) -> object:
    """The attribute ``name`` of ``package``, from its module in ``modules``, which is imported by this."""
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(modules[name]), name)
    setattr(sys.modules[package], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
