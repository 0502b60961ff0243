"""Exports by ExecuTorch whose constants are on disk.

- ``streaming``: ``streaming_constants``, whose ``with`` block is meant by "block" below.
  ``program``: ``write_program``, which writes the result.
- ``session``: the export of the current thread or task.  ``patching``: replaces functions of ExecuTorch, torch and
  ``copy`` during a block.
- ``hooks``: all that are replaced, from the modules ``hooks_*``: one for each kind of copy.
- ``held``: bytes on disk.  ``tensors``: from a tensor to bytes on disk.  ``placeholder``: stands in for such bytes.
- ``mps_pack``: an MPS payload assembled from bytes on disk.

``tensors`` and the hooks import torch or ExecuTorch: only a block imports them.
"""
