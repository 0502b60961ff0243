"""Writing a program whose constants are on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stream_pack.errors import StateError
from stream_pack.writer.sink import FileSink

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

__all__ = ["write_program"]


class _SinkFile:
    """A sink as a file object, to which ExecuTorch writes from beginning to end."""

    def __init__(self, sink: FileSink) -> None:
        self._sink = sink
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._sink.put(self.nbytes, data)
        self._sink.flush()  # the caller may use the memory again
        self.nbytes += len(data)
        return len(data)


def write_program(manager: ExecutorchProgramManager, path: str | os.PathLike[str]) -> int:
    """Write the program file of ``manager``, a chunk at a time, and return its length in bytes.

    Works in a block of ``streaming_constants``, after it, or without one, any number of times.  A file at ``path`` is
    replaced once the new one is complete and on the disk.  External data (``.ptd``) is not part of the program: the
    manager's ``write_tensor_data_to_file`` writes it.

    Raises: StateError for a manager that has no program yet; OSError (ENOSPC among others), also when ``path`` exists
    and is not a regular file: ``manager.write_to_file`` can write to it.
    """
    cord = getattr(manager, "_pte_data", None)
    if cord is None:
        raise StateError(
            f"cannot write {path!s}: a {type(manager).__name__} has no program yet, expected the "
            "ExecutorchProgramManager that to_executorch() returns"
        )
    with FileSink(path) as sink:
        sink.begin(len(cord), reserve=True)
        file = _SinkFile(sink)
        cord.write_to_file(file)
        sink.commit()
    return file.nbytes
