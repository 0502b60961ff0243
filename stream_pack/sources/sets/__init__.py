"""Checkpoints that are more than one file.

* ``recognise``: which set a folder holds;
* ``composite``: several sources as one, and opening the files of a set;
* ``assembly``: one tensor from parts of several files;
* ``hugging_face``: an index and its shards;
* ``llama``, ``llama_params``: the shards of Meta's Llama, and what ``params.json`` says of them;
* ``dcp``: torch.distributed checkpoints; ``dcp_metadata``: what their ``.metadata`` says; ``dcp_chunks``: what a chunk
  must satisfy; ``dcp_reformulated``: tensors that Megatron stores in another shape;
* ``ninja``: folders of mmap-ninja;
* ``companions``: what stands beside the weights, and is no tensor.
"""
