"""Checks of what callers pass, before it is used: ``paths``; ``jobs``: numbers, of threads and others."""
