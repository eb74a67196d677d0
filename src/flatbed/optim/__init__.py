"""Drop-ins for `torch.optim` that update all parameters in one pass over memory."""

from flatbed.rules.adadelta import Adadelta
from flatbed.rules.adagrad import Adagrad
from flatbed.rules.adam import Adam
from flatbed.rules.adamax import Adamax
from flatbed.rules.adamw import AdamW
from flatbed.rules.lion import Lion
from flatbed.rules.nadam import NAdam
from flatbed.rules.radam import RAdam
from flatbed.rules.rmsprop import RMSprop
from flatbed.rules.rowwiseadagrad import RowwiseAdagrad
from flatbed.rules.sgd import SGD
from flatbed.rules.sparseadam import SparseAdam
from flatbed.rules.torchs import from_torch

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
