"""Exports by ExecuTorch whose constants are on disk.

- ``streaming``: ``streaming_constants``, the block in which that is so.  ``program``: ``write_program``, which writes
  the result.
- ``session``: the export of the current thread.  ``patching``: replaces functions of ExecuTorch during a block.
- ``hooks``: all that are replaced, from the modules ``hooks_*``: one for each place that copies constants.
- ``held``: bytes on disk.  ``tensors``: from a tensor to bytes on disk.  ``placeholder``, ``held_file``: stand-ins for
  such bytes.
- ``mps_pack``: an MPS payload assembled from bytes on disk.

``held_file``, ``tensors`` and the hooks import torch or ExecuTorch: only a block imports them.
"""
