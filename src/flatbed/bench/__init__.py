"""Benchmarks: a case is data, a result is a row. They use flatbed's public names only."""
