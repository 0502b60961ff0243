"""Packs as MTLBuffers: :func:`open` gives each tensor's buffer and offset, and nothing is copied.

Importing this loads nothing of Apple's; on other systems :func:`open` raises MetalUnavailable, and
``stream-pack metal-plan`` tells how a Mac will use a pack.
"""

from __future__ import annotations

from stream_pack.metal.device import Buffer, Device, Residency
from stream_pack.metal.views import MetalView
from stream_pack.metal.weights import Weights, open

__all__ = ["Buffer", "Device", "MetalView", "Residency", "Weights", "open"]
