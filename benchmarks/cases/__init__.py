"""One file per benchmark; each has `CASES` and `run(options)`, which yields rows."""
