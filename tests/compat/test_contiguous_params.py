"""The loops of the original's README and Debugging section."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed.compat.contiguous_params import ContiguousParams
from tests.cases import assert_same


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    data = torch.randn(60, 1, 8)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), data


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        torch.optim.Adam,
        lambda p: torch.optim.Adam(p, fused=True),
    ],
)
@pytest.mark.parametrize("moves", [False, True])
def test_the_readme_loop_over_many_steps(make: Any, moves: bool) -> None:
    """Also with parameters that were created before the model moves; the GPU tests move it to a GPU."""
    model, data = model_and_data()

    # Create the contiguous parameters.
    parameters = ContiguousParams(model.parameters())
    optimizer = make(parameters.contiguous())
    if moves:
        model, data = model.double(), data.double()
        assert not parameters.buffer_is_valid()
        with pytest.raises(ValueError, match=r"float64.*\.half\(\).*rebind"):
            parameters.assert_buffer_is_valid()

    # Run the training loop as usual.
    for x in data:
        loss = model(x).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters.contiguous(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        parameters.assert_buffer_is_valid()

    reference = model_and_data()[0].to(data.dtype)
    expected = make(reference.parameters())
    for x in data:
        reference(x).sum().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        expected.step()
        expected.zero_grad()
    assert_same(reference, model, 1e-6)


def test_names_and_buffers() -> None:
    assert flatbed.ContiguousParams is ContiguousParams
    model, data = model_and_data()
    model[0].bias.requires_grad_(False)
    parameters = ContiguousParams(model.parameters())
    assert [id(p) for p in parameters.original()] == [id(p) for p in model.parameters()]
    (flat,) = parameters.contiguous()
    assert flat.data_ptr() == parameters.param_buffer.data_ptr()
    trained = [p for p in parameters.original() if p.requires_grad]
    assert parameters.data_pointers == [p.data_ptr() for p in trained]
    assert parameters.grad_pointers == [p.grad.data_ptr() for p in trained]
    assert not parameters.gradient_buffer.any()
    model(data[0]).sum().backward()
    assert parameters.gradient_buffer.any(), "gradients are connected"
    parameters.gradient_buffer.zero_()
    assert not model[0].weight.grad.any()
    model.zero_grad()
    model(data[0]).sum().backward()
    assert parameters._grad_buffer.any(), "and connected again after nn.Module.zero_grad"


def test_groups_and_several_dtypes() -> None:
    model, _ = model_and_data()
    model[1].double()
    parameters = ContiguousParams(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    )
    groups = parameters.contiguous()
    assert groups[0]["lr"] == 0.5
    torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError, match=r"2 buffers.*flat\.grad_buffers"):
        _ = parameters.gradient_buffer
    with pytest.raises(ValueError, match=r"2 buffers.*flat\.buffers"):
        _ = parameters.param_buffer


def test_an_update_that_is_not_in_place() -> None:
    model, data = model_and_data()
    parameters = ContiguousParams(model.parameters())
    optimizer = torch.optim.SGD(parameters.contiguous(), lr=0.01)
    model(data[0]).sum().backward()
    model[0].weight.data = model[0].weight.data * 0.5
    assert not parameters.buffer_is_valid()
    with pytest.raises(ValueError, match="not in place"):
        parameters.assert_buffer_is_valid()
    value = model[0].weight.detach().clone()
    parameters.make_params_contiguous()
    parameters.assert_buffer_is_valid()
    assert torch.equal(value, model[0].weight)
    model[1].weight.data = model[1].weight.data * 0.5
    expected = model[1].weight.data - 0.01 * model[1].weight.grad
    optimizer.step()  # brings it back
    torch.testing.assert_close(model[1].weight.data, expected)
    parameters.assert_buffer_is_valid()


def test_errors_do_not_speak_of_another_class() -> None:
    model, data = model_and_data()
    optimizer = torch.optim.SGD(ContiguousParams(model.parameters()).contiguous(), lr=0.01)
    model[0](data[0]).sum().backward()
    with pytest.raises(flatbed.FlatbedError, match=r"received no gradient.*missing='zero'") as caught:
        optimizer.step()
    assert "FlatParams" not in str(caught.value)
    for wrong in ([], model[0].weight):
        with pytest.raises((ValueError, TypeError), match="parameter") as refused:
            ContiguousParams(wrong)
        assert "FlatParams" not in str(refused.value)
