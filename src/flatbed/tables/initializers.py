"""First weights of a table. A row depends on (seed, row) only, not on chunks or threads."""

from __future__ import annotations

import hashlib
import math
import operator
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.tables.record import DTYPES, NAMES

CHUNK = 1 << 17  # elements drawn at once: long enough that threads seldom compete for the interpreter lock
MOST_THREADS = 8  # on 16 cores, 16 threads took longer than 8
BLOCK = 8  # 32-bit words per step of the Philox counter
SKIPPED_WORDS = 1024  # of 64 bits per row: as many are drawn in the time of two calls
TAIL = 7.0  # bound of a draw in standard deviations: sqrt(2 ln 2**33) is 6.8

Words: TypeAlias = NDArray[np.uint32]
Values: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Zeros:
    """All elements 0. Memory that is zero already is not touched."""

    @property
    def largest(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Constant:
    """All elements equal."""

    value: float

    def __post_init__(self) -> None:
        _finite_(self)

    @property
    def largest(self) -> float:
        return abs(self.value)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normally distributed elements: the distribution of torch.nn.Embedding, not the same numbers."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _finite_(self)
        if self.std < 0:
            raise ValueError(f"a standard deviation is not negative, found std={self.std}")

    @property
    def largest(self) -> float:
        return abs(self.mean) + TAIL * self.std


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniformly distributed elements in [low, high); 16-bit dtypes may round up to `high`."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _finite_(self)
        if self.low > self.high:
            raise ValueError(f"low must not be above high, found low={self.low}, high={self.high}")

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high), self.high - self.low)


Init: TypeAlias = Zeros | Constant | Normal | Uniform
KINDS: dict[str, Callable[..., Init]] = {
    "zeros": Zeros,
    "constant": Constant,
    "normal": Normal,
    "uniform": Uniform,
}
FORMS = '"normal", "uniform", "zeros", a number, ("normal", mean, std), ("uniform", low, high)'


def parse(init: object) -> Init:
    """Return the initializer for an `init` argument, in one of the forms of `FORMS`, or as it is."""
    if isinstance(init, (Zeros, Constant, Normal, Uniform)):
        return init
    if _is_number(init):
        return Constant(init)
    if isinstance(init, str) and init in ("zeros", "normal", "uniform"):
        return KINDS[init]()
    if isinstance(init, (tuple, list)) and len(init) == 3 and init[0] in ("normal", "uniform"):
        return KINDS[init[0]](*init[1:])
    raise ValueError(f"init={init!r} is not known; expected one of {FORMS}")


def describe(init: Init) -> dict[str, Any]:
    """Return an initializer as JSON values."""
    return {"kind": type(init).__name__.lower(), **asdict(init)}


def described(init: Mapping[str, Any]) -> Init:
    """Invert `describe`. Raises KeyError, TypeError or ValueError for wrong descriptions."""
    numbers = {name: value for name, value in init.items() if name != "kind"}
    return KINDS[init["kind"]](**numbers)


def fill_(
    out: Tensor,
    *,
    first_row: int,
    stride: int = 1,
    init: Init,
    seed: int,
    padding_idx: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Fill every `stride`-th row of a table from `first_row` on: `out` is (n, dim) on the CPU.

    A row depends only on `seed` (any integer), its number and `dim`. Values are drawn in float32 and rounded
    to the dtype. Several threads call `advance` with the number of rows that are done.
    """
    _check(out, first_row, init, padding_idx)
    n_rows, dim = out.shape
    if isinstance(init, (Zeros, Constant)):
        out.fill_(0.0 if isinstance(init, Zeros) else init.value)
        _tell(advance, n_rows)
    elif out.numel():
        rows = max(1, CHUNK // dim)
        target = (out.view(torch.int16) if out.dtype is torch.bfloat16 else out).numpy()

        def filler() -> Callable[[int], None]:
            draw = _Draw(init, dim, key(seed), stride)

            def fill_rows(start: int) -> None:
                stop = min(start + rows, n_rows)
                _store_(target[start:stop], draw(first_row + start * stride, stop - start), out.dtype)
                _tell(advance, stop - start)

            return fill_rows

        _in_threads(filler, range(0, n_rows, rows))
    if padding_idx is not None and padding_idx in range(first_row, first_row + n_rows * stride, stride):
        out[(padding_idx - first_row) // stride].zero_()


def key(seed: int) -> int:
    """Return the Philox key of a seed: 128 bits of BLAKE2b of its decimal digits."""
    digits = str(operator.index(seed)).encode()
    return int.from_bytes(hashlib.blake2b(digits, digest_size=16).digest(), "little")


class _Draw:
    """Draws rows of random numbers: row r uses `blocks` steps of the counter from r * blocks on.

    Each thread has its own, with buffers that it reuses: allocation would serialise the threads.
    """

    def __init__(self, init: Normal | Uniform, dim: int, key: int, stride: int = 1) -> None:
        self.init, self.dim, self.key, self.stride = init, dim, key, stride
        self._memory: dict[str, NDArray[Any]] = {}

    def __call__(self, first_row: int, n_rows: int) -> Values:
        """Return (n_rows, dim) of float32, valid until the next call."""
        words = self._words(first_row, n_rows)
        if isinstance(self.init, Normal):
            values = self._normal(words)
            values *= np.float32(self.init.std)
            values += np.float32(self.init.mean)
        else:
            low, high = np.float32(self.init.low), np.float32(self.init.high)
            values = self._uniform(words, "values")
            values *= high - low
            values += low
            np.minimum(values, np.nextafter(high, low), out=values)  # low + u * width may round up to high
        return values[:, : self.dim]

    def _words(self, first_row: int, n_rows: int) -> Words:
        """Draw the random words of every `stride`-th row."""
        blocks, stride = -(-self.dim // BLOCK), self.stride
        source = np.random.Philox(counter=first_row * blocks, key=self.key)
        n_words = blocks * (BLOCK // 2)
        if stride * n_words <= SKIPPED_WORDS:  # faster than a call for each row
            drawn = source.random_raw(n_rows * stride * n_words).view(np.uint32)
            return drawn.reshape(n_rows, stride, -1)[:, 0]
        words = np.empty((n_rows, n_words), np.uint64)
        for row in words:
            row[:] = source.random_raw(n_words)
            source.advance((stride - 1) * blocks)
        return words.view(np.uint32)

    def _empty(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        size = math.prod(shape)
        held = self._memory.get(name)
        if held is None or held.size < size:
            held = self._memory[name] = np.empty(size, dtype)
        return held[:size].reshape(shape)

    def _uniform(self, words: Words, name: str) -> Values:
        """Return numbers in [0, 1) with 24 random bits."""
        values = self._empty(name, words.shape)
        np.copyto(values, np.right_shift(words, 8, out=self._empty("bits", words.shape, np.uint32)))
        values *= np.float32(2**-24)
        return values

    def _normal(self, words: Words) -> Values:
        """Apply the Box-Muller transform to the first and second half of each row."""
        half = words.shape[1] // 2
        radius = self._empty("radius", (len(words), half))
        np.copyto(radius, words[:, :half], casting="same_kind")
        radius += np.float32(0.5)  # never 0, for the logarithm
        radius *= np.float32(2**-32)
        np.log(radius, out=radius)
        radius *= np.float32(-2.0)
        np.sqrt(radius, out=radius)
        angle = self._uniform(words[:, half:], "angle")
        angle *= np.float32(2 * math.pi)
        values, wave = self._empty("values", words.shape), self._empty("wave", angle.shape)
        np.multiply(radius, np.cos(angle, out=wave), out=values[:, :half])
        np.multiply(radius, np.sin(angle, out=wave), out=values[:, half:])
        return values


def _store_(target: NDArray[Any], values: Values, dtype: torch.dtype) -> None:
    """Round to nearest, ties to even. The target of bfloat16 is an array of 16-bit integers."""
    if dtype is torch.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        values = rounded.astype(np.uint16).view(np.int16)
    np.copyto(target, values, casting="same_kind")


def _in_threads(worker: Callable[[], Callable[[int], None]], starts: range) -> None:
    """Call a worker of each thread on its share of the starts. numpy releases the interpreter lock."""
    n_threads = min(torch.get_num_threads(), MOST_THREADS, len(starts))
    failed = threading.Event()

    def share(first: int) -> None:
        work = worker()
        for start in starts[first::n_threads]:
            if failed.is_set():
                return
            work(start)

    if n_threads == 1:
        return share(0)
    with ThreadPoolExecutor(n_threads) as pool:
        shares = [pool.submit(share, first) for first in range(n_threads)]
        try:
            for one in shares:
                one.result()
        except BaseException:
            failed.set()
            raise
    return None


def _tell(advance: Callable[[int], None] | None, n_rows: int) -> None:
    if advance is not None:
        advance(n_rows)


def _check(out: Tensor, first_row: int, init: Init, padding_idx: int | None) -> None:
    if out.dim() != 2 or out.device.type != "cpu" or out.dtype not in NAMES:
        found = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
        raise ValueError(f"expected a CPU tensor (rows, dim) of {', '.join(DTYPES)}, found {found}")
    if first_row < 0 or (padding_idx is not None and padding_idx < 0):
        raise ValueError(f"row numbers count from 0: first_row={first_row}, padding_idx={padding_idx}")
    # Random values are drawn in float32 for every dtype.
    limit = torch.finfo(out.dtype).max if isinstance(init, Constant) else _float32_or_less(out.dtype)
    if init.largest > limit:
        raise ValueError(f"{init} reaches {init.largest:.3g}, but {out.dtype} ends at {limit:.3g}")


def _float32_or_less(dtype: torch.dtype) -> float:
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _finite_(init: Constant | Normal | Uniform) -> None:
    """Convert the fields to finite floats, or raise."""
    for name, value in asdict(init).items():
        if not _is_number(value) or not math.isfinite(value):
            raise ValueError(f"{type(init).__name__}: {name}={value!r} is not a finite number")
        object.__setattr__(init, name, float(value))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
