"""Opens packs: maps them, and hands their tensors to NumPy and PyTorch.

* ``pack``, ``safe_open``: the public entry points, :func:`stream_pack.open` and that of safetensors; ``frameworks``:
  arrays of other libraries for it.  ``in_memory``: packs that are bytes, and no file.
* ``file_range``: its bytes, read by position.  ``opening``: what is proved of them before they are used.
* ``mapping``: the file as memory.
* ``views``: tensors and slices of them.  ``tensors``: their torch storages.  ``lending``: what memory is in use.
* ``locks``: what several threads, and a forked child, may use at a time.
* ``verify``: recomputes all checksums.  ``damage``: the report of that.  ``blocks``: checksums proved on first use.
* ``payload``, ``verify_et_file``: files as ExecuTorch writes them.

Above ``format`` and ``et_files``; never imports ``pipeline``, ``sources`` or ``writer``.
"""
