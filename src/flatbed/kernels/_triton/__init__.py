"""Triton kernels and their launches: the only folder that imports Triton.

`kernels/X.py` has the torch version of an operation, and calls `_triton/X.py` where `use_triton` says so.
"""
