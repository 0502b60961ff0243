"""What is where in files that ExecuTorch writes: programs (.pte), payloads of its delegates, data files (.ptd).

- ``survey``: all that a file holds, and what is wrong with it; the entry point, for readers and sources alike.
- ``program``: a program's flatbuffer.  ``tensors``: the constants that a program holds itself.
- ``read``: the header of a payload or data file.  ``decoders``: its constants, for each kind.
- ``constants``: constants as columns, and their faults.  ``payload``: one payload, and the file that it is read from.
- ``digests``: data that is called by its SHA-256.
- ``layouts``: ScalarTypes and dim orders.  ``mps_types``: MPSDataTypes, and what the MPS runtime does with them.

Pure: no I/O (the caller's file object reads), no torch, no ExecuTorch.  Imports ``format``.
"""
