"""Payloads of ExecuTorch's delegates, streamed: packs whose graph is the delegate's own.

- ``mps``, ``xnnpack``: the public functions, and the graph's flatbuffer with constants at given places.
- ``constants``: what a graph says of its constants, and the writing of a payload, which both share.

Imports the writer and the sources; ExecuTorch's serializers only when a payload is written.
"""
