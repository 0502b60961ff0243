"""Checkpoints of ``torch.save``, in both of its formats, read without torch and without running anything in them.

* ``source``: what the formats share.  ``zip``, ``legacy``: the source of each.  ``container``: what reads its storages.
* ``archive``, ``zip_records``, ``inflate``: the zip format: storages and their CRC-32, records, compression.
* ``unpickler``, ``globals``: the pickle, interpreted into inert values; what the names in it mean.
* ``state_dict``, ``nesting``, ``tensor_names``: which of these values are the tensors wanted, and their names;
  ``outline``: the keys to choose from.
* ``tensors``, ``dtensor``: from values to a catalog; one rank's part of a distributed tensor.
"""
