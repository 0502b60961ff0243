"""What lies where in files that ExecuTorch writes: programs, payloads of its delegates, data files."""
