"""What maps a pack and gives its tensors to NumPy and PyTorch.

* ``pack``, ``safe_open``: the public entry points, :func:`stream_pack.open` and the API of safetensors.
* ``opening``, ``mapping``: what is proved of a file on opening; its memory.
* ``lending``, ``views``, ``tensors``: memory that is in use; tensors and slices of them; torch storages.
* ``verify``, ``damage``, ``blocks``: all checksums and rules of the format, the report, and lazy verification.
* ``payload``, ``verify_et_file``: files as ExecuTorch writes them.

Above ``format`` and ``et_files``; never imports ``pipeline``, ``sources`` or ``writer``.
"""
