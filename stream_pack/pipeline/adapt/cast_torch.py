"""Rounding to bfloat16 by torch.  Imported only where ml_dtypes is not installed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["to_bfloat16"]


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The values rounded to bfloat16, as its bits.  Copies: the values (they may be misaligned) and the result."""
    rounded = torch.from_numpy(values.copy()).to(torch.bfloat16)
    bits: NDArray[np.uint16] = rounded.view(torch.int16).numpy().view("<u2")
    return bits
