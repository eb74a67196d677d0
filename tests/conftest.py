import pytest
import torch
from hypothesis import settings

# A shared machine may stall any single example; the suite as a whole has its own limit.
settings.register_profile("flatbed", deadline=None)
settings.load_profile("flatbed")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
