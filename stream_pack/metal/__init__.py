"""Packs as MTLBuffers: :func:`open` returns the buffer and offset of each tensor, and nothing is copied.

* ``weights``, ``views``: the public entry point; tensors as Metal binds them.
* ``device``, ``objc``, ``finalizers``: the GPU and its buffers; the Objective-C runtime, through ctypes; what happens
  when they are collected.
* ``rules``, ``placement``, ``plan``: what Metal requires, as arithmetic; which buffer each tensor is in; how a Mac will
  use a pack, predicted on any machine.
* ``interop``: the same tensors in PyTorch, MLX and pyobjc.

Importing this loads nothing of Apple's; on other systems :func:`open` raises MetalUnavailable, and
``stream-pack metal-plan`` shows how a Mac will use a pack.
"""

from __future__ import annotations

from stream_pack.metal.device import Buffer, Device, Residency
from stream_pack.metal.objc import Runtime
from stream_pack.metal.views import MetalView
from stream_pack.metal.weights import Weights, open

__all__ = ["Buffer", "Device", "MetalView", "Residency", "Runtime", "Weights", "open"]
