"""A pack that is bytes in memory, opened like a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from stream_pack.errors import OptionError, StreamPackError
from stream_pack.reader.pack import Pack
from stream_pack.reader.pack import open as open_pack

__all__ = ["open_bytes"]


@contextmanager
def open_bytes(data: bytes) -> Iterator[Pack]:
    """Open the pack that ``data`` is.  Arrays and tensors of it stay valid after the block.

    Copies: one of all bytes, into a file without a name: in memory on Linux, else in the system's temporary folder.
    Raises: OptionError for anything but bytes; as :func:`stream_pack.open`; OSError.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise OptionError(f"data: expected the bytes of a pack, got {type(data).__name__}")
    with ExitStack() as stack:
        file = stack.enter_context(
            os.fdopen(os.memfd_create("stream_pack"), "wb", buffering=0)
            if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
            else tempfile.NamedTemporaryFile(buffering=0)
        )
        path = f"/proc/self/fd/{file.fileno()}" if isinstance(file.name, int) else file.name
        rest = memoryview(data).cast("B")
        while rest:  # one call writes at most 2 GiB
            rest = rest[file.write(rest) :]
        try:
            pack = stack.enter_context(open_pack(path))
        except StreamPackError as error:
            # The file is nothing that the caller knows.
            error.args = (str(error).replace(path, "data"),)
            raise
        yield pack
