"""Models to train: five shapes, from a hundred equal layers to a GPT of 1.56 billion parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Sequence[Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """How to build a model, draw its batches and compute its loss.

    `build` makes the model on torch's default device, `make_batch` on the device of its generator.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Loss
    steps: int
    """Timed steps per variant, unless the caller asks for another number."""
    is_large: bool = False
    """Too large for the models of several variants to be in memory at once."""


def linear100(*, layers: int = 100, width: int = 128) -> nn.Module:
    """A chain of `layers` Linear(width, width): (n, width) → (n, width)."""
    chain = [nn.Linear(width, width) for _ in range(layers)]
    for layer in chain:
        # torch's own init shrinks the signal by √3 per layer: 100 of them end in denormal numbers.
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*chain)


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions around a shortcut: (n, c, h, w) → (n, 4·width, h/stride, w/stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels, width, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_conv_norm(channels, 4 * width, 1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet_like(*, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 10) -> nn.Module:
    """ResNet-50 with a stem for small images: (n, 3, 32, 32) → (n, classes). 161 parameters."""
    blocks: list[nn.Module] = []
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            blocks.append(Bottleneck(channels, width, stride=2 if stage > 0 and block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(
        *_conv_norm(3, 64, 3),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


def _conv_norm(channels: int, out: int, kernel: int, *, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(out)


def attention_blocks(layers: int, width: int, heads: int) -> nn.TransformerEncoder:
    """Attention and a two-layer perceptron, each behind a LayerNorm: (n, tokens, width) → same."""
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    block = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)
    return nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)


class Decoder(nn.Module):
    """GPT-2's shape, with the output layer tied to the token embedding: (n, tokens) → (n, tokens, vocab)."""

    def __init__(self, *, layers: int, width: int, vocab: int, context: int, head_width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = attention_blocks(layers, width, width // head_width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return F.linear(self.blocks(hidden, mask=mask, is_causal=True), self.tokens.weight)


class VisionTransformer(nn.Module):
    """Patches as tokens, a class token before them: (n, 3, image, image) → (n, classes)."""

    def __init__(self, *, image: int, patch: int, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (image // patch) ** 2, width))
        self.blocks = attention_blocks(layers, width, heads)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        out: Tensor = self.head(self.blocks(tokens + self.positions)[:, 0])
        return out


class ManySmall(nn.Module):
    """`count` vectors, each scaling its own input: `count` × (width,) → (count, width).

    One multiplication per vector, so that each gets a gradient of its own and no view of a shared one.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(1 + torch.randn(width) / 10) for _ in range(count))

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([x * scale for x, scale in zip(inputs, self.scales, strict=True)])


def _linear_batch(generator: torch.Generator, *, size: int, width: int) -> Batch:
    x = torch.randn(2, size, width, generator=generator, device=generator.device)
    return x[0], x[1]


def _image_batch(generator: torch.Generator, *, size: int, image: int = 32, classes: int = 10) -> Batch:
    images = torch.randn(size, 3, image, image, generator=generator, device=generator.device)
    return images, torch.randint(classes, (size,), generator=generator, device=generator.device)


def _token_batch(generator: torch.Generator, *, size: int, vocab: int, context: int) -> Batch:
    ids = torch.randint(vocab, (size, context + 1), generator=generator, device=generator.device)
    return ids[:, :-1], ids[:, 1:]


def _vector_batch(generator: torch.Generator, *, count: int = 2000, width: int = 64) -> Batch:
    x = torch.randn(count, width, generator=generator, device=generator.device)
    return (x, *x.unbind())


def _squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    return F.mse_loss(model(x), target)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _autocast_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return _cross_entropy(model, batch)


def _reproduce_inputs(model: nn.Module, batch: Batch) -> Tensor:
    target, *inputs = batch
    return F.mse_loss(model(*inputs), target)


def linear100_model(device: str) -> Model:
    """A chain of 100 small layers: 200 parameters, and a step that is bound by the host."""
    make_batch = partial(_linear_batch, size=32 if device == "cpu" else 128, width=128)
    return Model("linear100", linear100, make_batch, _squared_error, steps=50)


def resnet_model(device: str) -> Model:
    """ResNet-50 for small images."""
    make_batch = partial(_image_batch, size=4 if device == "cpu" else 32)
    return Model("resnet-like", resnet_like, make_batch, _cross_entropy, steps=10 if device == "cpu" else 50)


def gpt_model(device: str) -> Model:
    """A GPT-2-shaped decoder of 1.56 billion parameters; of 4 million on a CPU."""
    is_small = device == "cpu"
    layers, width, vocab, context = (4, 256, 4096, 64) if is_small else (48, 1600, 50257, 1024)
    build = partial(Decoder, layers=layers, width=width, vocab=vocab, context=context)
    make_batch = partial(_token_batch, size=1, vocab=vocab, context=context)
    return Model("gpt-like", build, make_batch, _cross_entropy, steps=20, is_large=not is_small)


def vit_model(device: str) -> Model:
    """ViT-B/16 under bf16 autocast: 152 parameters of 86.6 million elements; a small one on a CPU."""
    if device == "cpu":
        build = partial(VisionTransformer, image=32, patch=8, layers=4, width=192, heads=3, classes=10)
        return Model("vit-b16", build, partial(_image_batch, size=4), _cross_entropy, steps=20)
    build = partial(VisionTransformer, image=224, patch=16, layers=12, width=768, heads=12, classes=1000)
    make_batch = partial(_image_batch, size=32, image=224, classes=1000)
    return Model("vit-b16", build, make_batch, _autocast_cross_entropy, steps=50)


def many_small_model(device: str) -> Model:
    """2,000 vectors of 64 elements, where a step is all overhead."""
    build = partial(ManySmall, 2000, 64)
    return Model("many-small", build, _vector_batch, _reproduce_inputs, steps=30 if device == "cpu" else 10)


MODELS: dict[str, Callable[[str], Model]] = {
    "linear100": linear100_model,
    "resnet-like": resnet_model,
    "gpt-like": gpt_model,
    "vit-b16": vit_model,
    "many-small": many_small_model,
}
