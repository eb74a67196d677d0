"""Benchmarks of flatbed: `python -m benchmarks --help`. Not part of the package."""
