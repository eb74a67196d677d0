"""The one base class for what can go wrong at run time; wrong arguments stay ValueError or TypeError."""


class FlatbedError(RuntimeError):
    """Something flatbed refuses to do because the result would be wrong; the message says what to do."""


class DamagedFileError(FlatbedError):
    """A file that does not hold what its format demands; it stays as it is."""
