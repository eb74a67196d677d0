"""Drop-ins for `torch.optim` that update all parameters in one pass over memory."""

from flatbed.optim.from_torch import from_torch
from flatbed.optim.rules.adagrad import Adadelta, Adagrad, RMSprop, RowwiseAdagrad
from flatbed.optim.rules.adam import Adam, Adamax, AdamW, NAdam, RAdam, SparseAdam
from flatbed.optim.rules.sgd import SGD, Lion

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "SparseAdam",
    "from_torch",
]
