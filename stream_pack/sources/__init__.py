"""Everything that a pack can be made of: each kind of file, set of files or object is one ``Source``.

* ``open``: from what the caller names to the source that reads it;
* ``safetensors``, ``gguf``, ``torch_save``: checkpoints that are one file;
* ``sets``: checkpoints that are several files (Hugging Face, Llama, torch.distributed, mmap-ninja);
* ``executorch``: programs, payloads and data files that ExecuTorch wrote; ``pack``: packs;
* ``memory``: tensors and arrays of the caller;
* ``data_section``: what formats share that keep all data in one section.

Imports ``pickles``, ``pipeline``, ``et_files`` and ``format``; ``writer``, ``executorch`` and ``cli`` import it,
``reader`` never.
"""
