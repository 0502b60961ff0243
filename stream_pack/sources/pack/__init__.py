"""Packs as sources, from a file or a pipe, without mapping them.

* ``source``: the source; each block is verified as it passes.
* ``block_runs``: which requests are read together, so that a block that they share is read once.
"""
