"""SpeedTorch's API over flatbed, without CuPy: `import flatbed.compat.speedtorch as SpeedTorch`.

Names, arguments and the order of calls are SpeedTorch's. Rows that occur several times in a batch train
correctly, which they do not in SpeedTorch.
"""

from flatbed.compat.speedtorch.arrays import (
    COM,
    COMMM,
    CPUPytorchCOM,
    DataGadget,
    DataGadgetMM,
    GPUPytorchCOM,
    PMemory,
    PytorchCOM,
    my_pinned_allocator,
)
from flatbed.compat.speedtorch.factories import (
    CPUPytorchModelFactory,
    CPUPytorchOptimizerFactory,
    GPUPytorchModelFactory,
    GPUPytorchOptimizerFactory,
    ModelFactory,
    ModelFactoryMM,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchModelFactory,
    PytorchOptimizerFactory,
)

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PMemory",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
    "my_pinned_allocator",
]
