"""Takes tensors out again: from a pack, or anything that a pack can be made of, to files of other formats.

* ``extract``: the public functions.  ``options``: their options, defaults and checks.  ``report``: what they return.
* ``plan``: what is written, and what is lost.  ``file_plan``: what a file holds and where.
* ``safetensors``, ``torch_zip``, ``numpy``, ``raw``: the formats.  ``zip_archive``: the archive that two of them are.
* ``folder``: several files with an index, and what stood beside the source.
* ``placing``: where the bytes belong that flow in.

Above ``writer``, whose sinks and flow it uses.
"""
