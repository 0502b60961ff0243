"""The public function: any file that this package reads in place, inspected."""

from __future__ import annotations

import os
from dataclasses import replace

from stream_pack.inspection.inspection import Inspection
from stream_pack.inspection.of_et_file import inspect_et_file
from stream_pack.inspection.of_pack import inspect_pack
from stream_pack.metal.plan import plan_metal
from stream_pack.reader.pack import open as open_pack

__all__ = ["inspect"]


def inspect(
    path: str | os.PathLike[str], *, offset: int = 0, nbytes: int | None = None
) -> Inspection:
    """Describe a pack, or a program, raw payload or data file of ExecuTorch's: what ``stream-pack inspect`` prints.

    ``offset`` and ``nbytes`` say where it is inside another file, as for :func:`stream_pack.open`.  No byte of a tensor
    is read, so damage in one is not seen: :func:`stream_pack.verify` finds that.

    Units: bytes; ``offset`` counts from the file's first byte.
    Raises: OSError; OptionError; NotAPackError, NewerVersionError, TruncatedError, TrailingBytesError, FormatError,
    ChecksumError (of the head).
    """
    inspection = inspect_et_file(path, offset=offset, nbytes=nbytes)
    if inspection is None:
        with open_pack(path, offset=offset, nbytes=nbytes) as pack:
            inspection = replace(inspect_pack(pack), metal=plan_metal(pack).summary())
    return inspection
