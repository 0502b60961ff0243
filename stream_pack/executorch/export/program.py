"""Writing a program whose constants lie on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stream_pack.errors import StateError
from stream_pack.writer.sink import FileSink

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

__all__ = ["write_program"]


class _SinkFile:
    """A sink as the file object that ExecuTorch writes to, front to back."""

    def __init__(self, sink: FileSink) -> None:
        self._sink = sink
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._sink.put(self.nbytes, data)
        self._sink.flush()  # the caller may use the memory again
        self.nbytes += len(data)
        return len(data)


def write_program(manager: ExecutorchProgramManager, path: str | os.PathLike[str]) -> int:
    """Write the program file of ``manager``, from a block of ``streaming_constants`` or not, and return its length in
    bytes.

    A chunk at a time; a file at ``path`` is replaced when the new one is complete and on the disk, not before.  In the
    block or after it, as often as you like.  External data (``.ptd``) is not part of it: that is what the manager's
    ``write_tensor_data_to_file`` writes.

    Raises: StateError for what is no program yet; OSError (ENOSPC among others), also when ``path`` is there and not a
    regular file: to such a one, ``manager.write_to_file`` streams.
    """
    cord = getattr(manager, "_pte_data", None)
    if cord is None:
        raise StateError(
            f"{path!s}: a {type(manager).__name__} is no program yet, expected an ExecutorchProgramManager: give what "
            "to_executorch() returns"
        )
    with FileSink(path) as sink:
        sink.begin(len(cord), reserve=True)
        file = _SinkFile(sink)
        cord.write_to_file(file)
        sink.commit()
    return file.nbytes
