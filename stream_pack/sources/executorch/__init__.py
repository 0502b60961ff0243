"""Files that ExecuTorch wrote, as sources."""
