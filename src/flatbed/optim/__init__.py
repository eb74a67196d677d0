"""Drop-ins for `torch.optim` that update all parameters in one pass over memory."""

from flatbed.optim.from_torch import from_torch
from flatbed.optim.rules.adadelta import Adadelta
from flatbed.optim.rules.adagrad import Adagrad
from flatbed.optim.rules.adam import Adam
from flatbed.optim.rules.adamax import Adamax
from flatbed.optim.rules.adamw import AdamW
from flatbed.optim.rules.lion import Lion
from flatbed.optim.rules.nadam import NAdam
from flatbed.optim.rules.radam import RAdam
from flatbed.optim.rules.rmsprop import RMSprop
from flatbed.optim.rules.rowwiseadagrad import RowwiseAdagrad
from flatbed.optim.rules.sgd import SGD
from flatbed.optim.rules.sparseadam import SparseAdam

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
