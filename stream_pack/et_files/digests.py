"""Data that is called by its own SHA-256, so that its bytes can be verified.

Source: ExecuTorch 1.5.1, backends/xnnpack/operators/node_visitor.py (constants, and ``scale_`` for the scales of
quantized ones) and backends/vulkan/serialization/vulkan_graph_builder.py; the bytes are those of the segment, without
the padding that follows it.  Other backends' names are hashes of something else, or none.
"""

from __future__ import annotations

import re
from collections.abc import Sized

from stream_pack.et_files.survey import Survey

__all__ = ["describe_digests", "named_digests"]

_NAME = re.compile(r"(?:scale_)?([0-9a-f]{64})")


def named_digests(survey: Survey) -> dict[int, bytes]:
    """The SHA-256 that constants must have, by their rows."""
    first = 0
    digests: dict[int, bytes] = {}
    for group, count in survey.groups:
        if group == "named data" or survey.kind == "ptd":
            for row in range(first, first + count):
                found = _NAME.fullmatch(survey.constants.names[row])
                if (
                    found and survey.constants.nbytes[row]
                ):  # the bytes of a segment outside the file are a fault already
                    digests[row] = bytes.fromhex(found[1])
        first += count
    return digests


def describe_digests(digests: Sized, survey: Survey) -> str:
    """Which checksums the constants of the file have, as a phrase."""
    if not digests:
        return "none"
    return "SHA-256 of each constant" if len(digests) == len(survey.constants) else f"SHA-256 of {len(digests)}"
