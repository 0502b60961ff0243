"""Checkpoints that are more than one file.

* ``recognise``: which set a folder holds;
* ``composite``: several sources as one, and opening the files of a set;
* ``assembly``: one tensor from parts of several files;
* ``hugging_face``: an index and its shards;
* ``llama``, ``llama_params``: the shards of Meta's Llama, and what ``params.json`` says of them;
* ``dcp``, ``dcp_metadata``: torch.distributed checkpoints;
* ``ninja``: folders of mmap-ninja.
"""
