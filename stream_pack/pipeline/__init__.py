"""How bytes flow from a source to a writer, in one pass and bounded memory.

* ``source``: the protocol of a source, and what passes between the stages: requests, pieces, chunks.
* ``bytestream``: one stream of bytes, from a file or a pipe.  ``scatter``: its bytes cut into the requested buffers.
* ``file_state``: whether a file that is read has been changed meanwhile.
* ``geometry``, ``gather``: where the elements of a strided tensor are, and its bytes in row-major order.
* ``places``: where in which file the requested bytes lie.  ``chunks``: what moves in one step.
* ``arrival``, ``spool``: which buffers come before their turn, and the temporary files where they wait.
* ``overlap``: a stage in a thread of its own.
* ``budget``: how much memory all of it takes.  ``memory``: how much this process has.
* ``adapt``: a source with other tensors, names or dtypes.

Above ``format``; knows neither particular sources nor the writer.
"""
