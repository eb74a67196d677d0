"""Embedding tables: modules, lookups, gradients, records of rows, and the cache and storage for them."""
