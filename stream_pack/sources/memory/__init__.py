"""Tensors in the caller's memory.

* ``source``: the source, for a mapping of names or a module.
* ``tensor``: what is known of one tensor, whichever library made it.
* ``torch_tensors``, ``numpy_arrays``: that, from torch (imported only for torch objects) and from NumPy.
"""
