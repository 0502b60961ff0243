"""What a file holds and what fills it, to its last byte: :func:`stream_pack.inspect` and the command ``inspect``.

* ``inspect``: the public function, for any file; packs and raw payloads.
* ``inspection``: its result, and the JSON and text of it.
* ``of_et_file``: programs, payloads and data files as ExecuTorch writes them.
* ``rows``: a row for each tensor of an index, with the tensors that share its bytes.

Above ``reader`` and ``metal``, below the command line.
"""
