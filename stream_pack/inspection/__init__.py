"""What a file holds and what fills it, to its last byte: :func:`stream_pack.inspect` and the command ``inspect``.

* ``inspect``: the public function, for anything; packs and raw payloads.
* ``inspection``: its result, and the JSON of it; ``text``: tables for people.
* ``choice``, ``folding``: which tensors are listed, and many in one line.
* ``of_et_file``: programs, payloads and data files as ExecuTorch writes them; ``of_source``: all that can be converted.
* ``page``: all of it as one page of HTML, made from ``page.html``.
* ``diff``: the public function that compares two files.  ``difference``: its result.  ``fingerprints``: what
  identifies the bytes of tensors.  ``values``: how far their elements are apart.
* ``rows``: a row for each tensor of an index, with the tensors that share its bytes.

Above ``reader``, ``writer``, ``sources`` and ``metal``, below the command line.
"""
