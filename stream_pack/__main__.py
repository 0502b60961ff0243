"""``python -m stream_pack``."""

from __future__ import annotations

import sys

from stream_pack.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m stream_pack"))
