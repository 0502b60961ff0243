"""Files that ExecuTorch wrote, as sources.

* ``source``: the constants that a survey (:mod:`stream_pack.et_files`) finds;
* ``catalog``: as a catalog; ``reordered``: tensors of another dim order, gathered from a pipe;
* ``named``: data called by its SHA-256, compared as it passes;
* ``heads``: reading what describes them, in place or from a pipe;
* ``footers``: recognises a damaged pack that looks like a raw payload.
"""
