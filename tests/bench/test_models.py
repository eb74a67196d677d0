import pytest
import torch

from flatbed.bench.models import (
    CASES,
    count_parameters,
    find_case,
    gpt_like,
    many_small,
    resnet_like,
    vit_b16,
)

CPU = torch.device("cpu")
SIZES = {
    "linear100": (200, 100 * (128 * 128 + 128)),
    "resnet-like": (161, 23_520_842),
    "gpt-like": (52, 4_224_512),
    "vit-b16": (56, 1_822_282),
    "many-small": (2000, 2000 * 64),
}


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_and_has_the_stated_size(name: str) -> None:
    case = find_case(name, CPU)
    model = case.build()
    assert case.name == name
    assert count_parameters(model) == SIZES[name]

    loss = case.loss(model, case.make_batch(torch.Generator().manual_seed(0)))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.any() for p in model.parameters())


def test_batches_follow_their_seed() -> None:
    for name in CASES:
        case = find_case(name, CPU)
        first, again, other = (case.make_batch(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert all(map(torch.equal, first, again))
        assert not all(map(torch.equal, first, other))


def test_the_gpt_for_gpus_has_one_and_a_half_billion_parameters() -> None:
    case = find_case("gpt-like", torch.device("cuda"))
    with torch.device("meta"):
        assert count_parameters(case.build()) == (580, 1_557_611_200)
    assert case.one_at_a_time


def test_the_vision_cases_for_gpus_have_their_usual_size() -> None:
    sizes = {"resnet-like": (161, 23_520_842), "vit-b16": (152, 86_567_656)}
    shapes = {"resnet-like": (32, 3, 32, 32), "vit-b16": (32, 3, 224, 224)}
    for name, size in sizes.items():
        case = find_case(name, torch.device("cuda"))
        with torch.device("meta"):
            assert count_parameters(case.build()) == size
        images, labels = case.make_batch(torch.Generator())
        assert images.shape == shapes[name]
        assert labels.shape == (32,)


def test_the_vision_transformer_for_gpus_computes_in_bf16_and_trains_in_fp32() -> None:
    case = find_case("vit-b16", torch.device("cuda"))
    model = vit_b16(image=32, patch=16, layers=1, width=16, heads=2, classes=3)
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    case.loss(model, (torch.randn(2, 3, 32, 32), torch.tensor([0, 2]))).backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_every_patch_takes_part_in_the_class() -> None:
    model = vit_b16(image=32, patch=8, layers=1, width=16, heads=2, classes=3)
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    model(images).sum().backward()
    assert (images.grad != 0).all()


def test_many_small_gives_every_parameter_a_gradient_of_its_own() -> None:
    case = find_case("many-small", CPU)
    model = many_small()
    assert {p.shape for p in model.parameters()} == {(64,)}
    case.loss(model, case.make_batch(torch.Generator())).backward()
    grads = [p.grad for p in model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 2000


def test_the_decoder_does_not_look_ahead() -> None:
    model = gpt_like(layers=2, width=64, vocab=50, context=8)
    ids = torch.arange(8)[None]
    later = ids.clone()
    later[0, 5:] = 40
    before, after = model(ids), model(later)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_resnet_classifies_small_images() -> None:
    assert resnet_like(classes=7)(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no model named 'vgg'; there are linear100"):
        find_case("vgg", CPU)
