"""Tensors in the caller's memory: ``source`` finds what shares memory, and streams it.

* ``tensor``: what is known of one tensor, whichever library made it;
* ``numpy_arrays``, ``torch_tensors``: how each library's tensors are described and read (torch only if it is loaded).
"""
