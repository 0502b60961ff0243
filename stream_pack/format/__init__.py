"""What a pack is, as docs/FORMAT.md says it, and how it differs from other files: pure, no I/O, no torch.

* ``limits``, ``dtypes``, ``align``, ``checksum``: the constants and rules that everything else uses.
* ``catalog``: what a source holds.  ``layout``: from a catalog to the place of every byte.
* ``index``: tensors and buffers as columns, encoded and decoded.  ``ragged``, ``ranges``, ``names``: columns of rows,
  of ranges, of names; ``rows``: columns read row by row.
* ``header``, ``graph_mps``, ``graph_xnnpack``, ``graph_ptd``: the header kinds, each with ExecuTorch's flatbuffer;
  ``header_kinds``: the table of them; ``graph_mps_nodes``: what an MPS graph computes with.  ``records``: locator and
  footer.
* ``head``: all of these together.  ``proof``: that bytes are a pack.
* ``flatbuf``, ``flatbuf_write``: flatbuffers read and written by columns.  ``schema``: their schemas.
* ``file_kinds``: what any file is, from its first bytes, and the advice for each kind that cannot be read.

Above ``errors`` and ``text`` only; everything else may import it.
"""
