"""The optimizers by family: their arithmetic as torch operations, and for one element as Triton functions."""
