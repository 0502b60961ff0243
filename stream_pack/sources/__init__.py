"""What a pack can be made of: one module or package for each format, each with a :class:`Source` of ``pipeline``.

* ``open``: from what the caller passed, a path, a pipe or a mapping, to the source that reads it.
* ``torch_save``, ``safetensors``, ``gguf``, ``pack``: checkpoints in one file or from a pipe.
* ``sets``: checkpoints of several files.  ``executorch``: constants in files that ExecuTorch wrote.
* ``memory``: torch tensors and NumPy arrays of the caller.
* ``data_section``: what formats share that keep all data in one section.

Above ``pipeline`` and ``et_files``.  Sources do not import each other, except for sets, whose files are sources.
docs/adding-a-source.md says how to add one.
"""
