"""Writes packs: to a file or a stream, from one process or several.

* ``convert``: the public functions that write a whole pack; ``options``: their options, defaults and checks.
* ``plan``: what is packed where.  ``needs``: the memory and disk space that takes.  ``forecast``: both, as numbers.
  ``report``: what they and a conversion return.
* ``pack``: carries it out: head, region, checksums, footer.  ``flow``: the bytes of a source, on their way into a sink.
  ``region``: hashes chunks and says where they go.
* ``sink``: the target, a file or a stream.  ``temporary``: its unfinished file.
  ``attributes``: what it takes over from the file that it replaces.  ``writeback``: the writes themselves.
* ``incremental``, ``parallel``: packs whose tensors the caller brings, from one process or many.

Above ``sources``; never imports ``reader``.
"""
