"""Checkpoints of ``torch.save``, in both of its formats, read without torch.

* ``zip``, ``legacy``: the two formats as sources; ``source``: what they share; ``container``: how both give storages;
* ``archive``: the records of a zip; ``zip_records``: their headers and directory; ``inflate``: compressed ones;
* ``unpickler``: a pickle machine that runs nothing; ``globals``, ``dtensor``: what the names in a pickle mean;
* ``nesting``: which of the nested values is taken; ``tensor_names``: names for it; ``state_dict``: the result;
* ``outline``: a table of what is nested where; ``tensors``: from the pickle's tensors to a catalog.
"""
