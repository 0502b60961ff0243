"""GGUF files, read without the gguf package.

* ``header``: key-values and tensors, from a header that may be hostile.
* ``source``: the source; quantized tensors stay blocks of bytes, with notes that say what they mean.
"""
