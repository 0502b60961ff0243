"""Exports by ExecuTorch whose constants are on disk.

- ``streaming``: ``streaming_constants``, the block in which that is so.  ``program``: ``write_program``, which writes
  what it gives.
- ``session``: the export of the current thread.  ``patching``: replaces functions of ExecuTorch during a block.
- ``hooks``: all that are replaced, from the modules ``hooks_*``: one for each place that copies constants.
- ``held``: bytes on disk.  ``tensors``: from a tensor to those.  ``placeholder``, ``held_file``: what stands for them.
- ``mps_pack``: an MPS payload put together of bytes on disk.

``held_file``, ``tensors`` and the hooks import torch or ExecuTorch: only a block imports them.
"""
