"""Checkpoints of ``torch.save``, in both of its formats, read without torch.

* ``zip``, ``legacy``: the two formats as sources; ``source``: what they share; ``container``: how both give storages;
* ``archive``: the records of a zip; ``zip_records``: their headers and directory; ``inflate``: compressed ones;
* ``tensors``: from the pickle's tensors to a catalog.

What the pickle itself says is read by ``pickles``.
"""
