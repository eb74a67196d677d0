"""Calls of CUDA beyond torch: the driver, host memory that kernels address, graphs, streams and their order.

No other folder opens libcuda or creates streams.
"""
