"""Files that ExecuTorch wrote, as sources.

* ``source``: the constants that a survey (:mod:`stream_pack.et_files`) finds;
* ``heads``: reading what describes them, in place or from a pipe;
* ``footers``: recognises a damaged pack that looks like a raw payload.
"""
