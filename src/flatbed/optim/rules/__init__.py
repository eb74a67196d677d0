"""One file per optimizer: its arithmetic as torch operations, and for one element as Triton functions."""
