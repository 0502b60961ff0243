"""Checkpoints of several files, each kind recognised by what its folder holds.

* ``recognise``: which kind a folder is.
* ``hugging_face``: shards and their index.  ``llama``, ``llama_params``: Meta's shards and their params.json.
* ``dcp``, ``dcp_metadata``: a torch.distributed checkpoint and its .metadata.  ``ninja``: arrays of mmap-ninja.
* ``composite``: opening the files of a set, and many sources as one.  ``assembly``: tensors joined from parts.
"""
