"""flatbed puts training memory where it should be: flat parameters for optimizers that run one kernel."""

from flatbed import optim
from flatbed._version import __version__
from flatbed.compat.contiguous_params import ContiguousParams
from flatbed.errors import FlatbedError
from flatbed.flat.checkpoint import state_dict
from flatbed.flat.ema import EMA
from flatbed.flat.health import Problem
from flatbed.flat.parameter import FlatParameter
from flatbed.flat.params import FlatParams, Snapshot
from flatbed.layout import Segment

__all__ = [
    "EMA",
    "ContiguousParams",
    "FlatParameter",
    "FlatParams",
    "FlatbedError",
    "Problem",
    "Segment",
    "Snapshot",
    "__version__",
    "optim",
    "state_dict",
]
