"""First weights of a table. A row depends on (seed, row) only, not on chunks or threads."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.tables.workers import Workers, split

CHUNK = 1 << 17  # elements drawn at once: long enough that threads seldom compete for the interpreter lock
MOST_THREADS = 8  # on 16 cores, 16 threads took longer than 8
BLOCK = 8  # 32-bit words per step of the Philox counter
SKIPPED_WORDS = 1024  # up to this many 64-bit words per row, drawing and dropping beats a call per row
TAIL = 7.0  # bound of a draw in standard deviations: sqrt(2 ln 2**33) is 6.8
NUMBERS = {"zeros": (), "constant": ("value",), "normal": ("mean", "std"), "uniform": ("low", "high")}
"""Names of the numbers of each kind of initializer."""
FORMS = '"normal", "uniform", "zeros", a number, ("normal", mean, std), ("uniform", low, high)'

Words: TypeAlias = NDArray[np.uint32]
Values: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Init:
    """A kind of first weights, and its numbers.

    "normal" is the distribution of torch.nn.Embedding, not the same numbers. "uniform" is in [low, high);
    16-bit dtypes may round up to `high`.
    """

    kind: str
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value in zip(NUMBERS[self.kind], self.numbers, strict=True):
            if not _is_number(value) or not math.isfinite(value):
                raise ValueError(f"init: {name}={value!r} is not a finite number")
        object.__setattr__(self, "numbers", tuple(map(float, self.numbers)))
        if self.kind == "normal" and self.numbers[1] < 0:
            raise ValueError(f"a standard deviation is not negative, found std={self.numbers[1]}")
        if self.kind == "uniform" and self.numbers[0] > self.numbers[1]:
            raise ValueError("low must not be above high, found low={}, high={}".format(*self.numbers))

    @property
    def largest(self) -> float:
        """An upper bound of all magnitudes."""
        if self.kind == "normal":
            mean, std = self.numbers
            return abs(mean) + TAIL * std
        if self.kind == "uniform":
            low, high = self.numbers
            return max(abs(low), abs(high), high - low)
        return abs(self.numbers[0]) if self.numbers else 0.0


def parse(init: object) -> Init:
    """Return the initializer for an `init` argument, in one of the forms of `FORMS`."""
    if _is_number(init):
        return Init("constant", (init,))
    if isinstance(init, str) and init in ("zeros", "normal", "uniform"):
        return Init(init, () if init == "zeros" else (0.0, 1.0))
    if isinstance(init, (tuple, list)) and len(init) == 3 and init[0] in ("normal", "uniform"):
        return Init(init[0], tuple(init[1:]))
    raise ValueError(f"init={init!r} is not known; expected one of {FORMS}")


def describe(init: Init) -> dict[str, Any]:
    """Return an initializer as JSON values."""
    return {"kind": init.kind, **dict(zip(NUMBERS[init.kind], init.numbers, strict=True))}


def from_json(init: Mapping[str, Any]) -> Init:
    """Build an initializer from the result of `describe`.

    Raises KeyError, TypeError or ValueError for wrong descriptions.
    """
    return Init(init["kind"], tuple(init[name] for name in NUMBERS[init["kind"]]))


def check_fits(init: Init, dtype: torch.dtype) -> None:
    """Raise if values would overflow. Random values are drawn in float32 for every dtype."""
    limit = torch.finfo(dtype).max
    if init.kind != "constant":
        limit = min(limit, torch.finfo(torch.float32).max)
    if init.largest > limit:
        raise ValueError(f"{init} reaches {init.largest:.3g}, but {dtype} ends at {limit:.3g}")


def fill_(
    out: Tensor, *, first_row: int, stride: int = 1, init: Init, seed: int, padding_idx: int | None = None
) -> None:
    """Fill every `stride`-th row of a table from `first_row` on: `out` is (n, dim) on the CPU.

    A row depends only on `seed` (any integer), its number and `dim`. Values are drawn in float32 and rounded
    to the dtype.
    """
    n_rows, dim = out.shape
    if init.kind in ("zeros", "constant"):
        out.fill_(init.numbers[0] if init.numbers else 0.0)
    elif out.numel():
        rows = max(1, CHUNK // dim)
        target = (out.view(torch.int16) if out.dtype is torch.bfloat16 else out).numpy()

        def fill(chunks: slice) -> None:
            for start in range(chunks.start * rows, min(chunks.stop * rows, n_rows), rows):
                part = target[start : start + rows]
                first = first_row + start * stride
                words = _words(key(seed), dim, range(first, first + len(part) * stride, stride))
                _store_(part, _draw(init, words)[:, :dim], out.dtype)

        with closing(Workers()) as workers:  # numpy releases the interpreter lock
            n_threads = min(torch.get_num_threads(), MOST_THREADS)
            split(workers, fill, -(-n_rows // rows), n_parts=n_threads)
    if padding_idx is not None and padding_idx in range(first_row, first_row + n_rows * stride, stride):
        out[(padding_idx - first_row) // stride].zero_()


def key(seed: int) -> int:
    """Return the Philox key of a seed: 128 bits of BLAKE2b of its decimal digits."""
    digits = str(operator.index(seed)).encode()
    return int.from_bytes(hashlib.blake2b(digits, digest_size=16).digest(), "little")


def _draw(init: Init, words: Words) -> Values:
    """Turn the random words of rows into values of the same shape."""
    first, second = map(np.float32, init.numbers)
    if init.kind == "normal":
        values = _normal(words)
        values *= second
        values += first
        return values
    values = _uniform(words)
    values *= second - first
    values += first
    np.minimum(values, np.nextafter(second, first), out=values)  # low + u * width may round up to high
    return values


def _words(key: int, dim: int, rows: range) -> Words:
    """Draw the random words of rows: row r uses the `blocks` counter values that follow r * blocks."""
    blocks, stride = -(-dim // BLOCK), rows.step
    source = np.random.Philox(counter=rows.start * blocks, key=key)
    n_words = blocks * (BLOCK // 2)
    if stride * n_words <= SKIPPED_WORDS:  # faster than a call for each row
        drawn = source.random_raw(len(rows) * stride * n_words).view(np.uint32)
        return drawn.reshape(len(rows), stride, -1)[:, 0]
    words = np.empty((len(rows), n_words), np.uint64)
    for row in words:
        row[:] = source.random_raw(n_words)
        source.advance((stride - 1) * blocks)
    return words.view(np.uint32)


def _uniform(words: Words) -> Values:
    """Return numbers in [0, 1) with 24 random bits."""
    values = (words >> 8).astype(np.float32)
    values *= np.float32(2**-24)
    return values


def _normal(words: Words) -> Values:
    """Apply the Box-Muller transform to the first and second half of each row."""
    half = words.shape[1] // 2
    radius = words[:, :half].astype(np.float32)
    radius += np.float32(0.5)  # never 0, for the logarithm
    radius *= np.float32(2**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = _uniform(words[:, half:])
    angle *= np.float32(2 * math.pi)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def _store_(target: NDArray[Any], values: Values, dtype: torch.dtype) -> None:
    """Round to nearest, ties to even. The target of bfloat16 is an array of 16-bit integers."""
    if dtype is torch.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        values = rounded.astype(np.uint16).view(np.int16)
    np.copyto(target, values, casting="same_kind")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
