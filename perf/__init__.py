"""Benchmarks against peers: ``python -m perf`` prints a table and one JSON line for each."""
