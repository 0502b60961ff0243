"""The constants in a program, payload or data file that ExecuTorch wrote.

* ``source``: the source; where things are in the file is known to ``et_files``.
* ``heads``: reads the heads, in place or from a pipe.
* ``footers``: notices a pack whose locator is lost, which looks like ExecuTorch's own payload.
"""
