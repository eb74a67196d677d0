"""Rows in several ways, in turns: contents that tell rows apart, times, and a check beside every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatbed.bench.measure import percentiles, synchronize
from flatbed.bench.reach_rows import BENCHMARK, FLATBED, Clock, Direction, ReachRow, Storage
from flatbed.bench.rows import Machine
from flatbed.bench.tables_measure import Dma, device_time, distinct_ids, wall_time

SEED = 41
WARM_UP = 2
CHUNK_WORDS = 1 << 22
BLOCK_WORDS = 3 << 28  # whole rows of all sizes; read as fp32, no word is infinite or none
MASK = (1 << 30) - 1
SALT = 0x15A4E35D  # odd: words of other blocks are not only other ones but in another order, too


@dataclass(frozen=True, slots=True)
class Shape:
    """A table as it is seen for one measurement, and how many of its rows are moved."""

    table_bytes: int
    row_bytes: int
    most_ids: int

    @property
    def n_rows(self) -> int:
        return self.table_bytes // self.row_bytes

    @property
    def n_words(self) -> int:
        """In a row, of 4 bytes each."""
        return self.row_bytes // 4

    @property
    def n_ids(self) -> int:
        return max(1, min(self.most_ids, self.n_rows // 4))

    def of(self, memory: Tensor) -> Tensor:
        """The first bytes of some memory, uint8 → (n_rows, n_words) of fp32."""
        return memory[: self.n_rows * self.row_bytes].view(torch.float32).view(self.n_rows, self.n_words)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to move rows of a table. Ids are where they come from, rows are fp32 on the computing device."""

    name: str
    memory: str
    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], object]
    look: Callable[[Tensor], Tensor]
    """Rows on any device, read in a way that is not measured, by ids on the host."""

    @property
    def ours(self) -> bool:
        return self.name.startswith(FLATBED)


@dataclass(frozen=True, slots=True)
class ReachSetting:
    """Where, how often, beside which speed, and who is told of ways that do not run."""

    device: torch.device
    machine: Machine
    dma: Dma
    n_samples: int
    left_out: Callable[[str, str], object]
    """Called with a way and the reason."""
    ids_on_device: bool = False

    @property
    def clock(self) -> Clock:
        return "gpu" if self.ids_on_device and self.device.type == "cuda" else "wall"


# ---- contents


def fill_(memory: Tensor, first_word: int = 0) -> None:
    """Fill memory (uint8) so that no two rows are equal, as a table's from some word on."""
    words = memory.view(torch.int32)
    counting = torch.arange(CHUNK_WORDS, dtype=torch.int32, device=memory.device)
    start = 0
    while start < len(words):
        at = first_word + start
        within = at % CHUNK_WORDS
        n = min(CHUNK_WORDS - within, len(words) - start)
        others = (at - within) % BLOCK_WORDS ^ _salt(at // BLOCK_WORDS)  # bits of the chunk
        torch.bitwise_xor(counting[within : within + n], others, out=words[start : start + n])
        start += n


def _salt(block: int) -> int:
    return block * SALT & MASK


def contents(ids: Tensor, n_words: int) -> Tensor:
    """What `fill_` wrote into these rows: (n,) → (n, n_words) of int32, on the device of the ids."""
    first = ids * n_words
    words = (first % BLOCK_WORDS).to(torch.int32).unsqueeze(1)
    salt = (first // BLOCK_WORDS * SALT & MASK).to(torch.int32).unsqueeze(1)
    return (words + torch.arange(n_words, dtype=torch.int32, device=ids.device)).bitwise_xor_(salt)


def same_words(found: Tensor, expected: Tensor) -> bool:
    """Whether rows hold exactly these words, wherever they are."""
    return torch.equal(found.detach().to(expected.device).contiguous().view(torch.int32), expected)


# ---- times


@dataclass(slots=True)
class Readings:
    """What is known of one way."""

    times: list[float] = field(default_factory=list)
    ok: bool = True


class Turns:
    """Calls of all ways, one after the other, again and again, each with ids of its own."""

    def __init__(self, shape: Shape, setting: ReachSetting) -> None:
        self.shape = shape
        self.setting = setting
        self._generator = torch.Generator().manual_seed(SEED)
        self._stamp = 0

    def take(self, ways: Sequence[Way], direction: Direction) -> dict[Way, Readings]:
        """What each way took; one of others that fails is named and left out."""
        call = self._read if direction == "read" else self._write
        found = {way: Readings() for way in ways}
        for turn in range(WARM_UP + self.setting.n_samples):
            for way, readings in list(found.items()):
                try:
                    time, ok = call(way)
                except Exception as error:  # of any kind: a peer must not cost what comes after it
                    if way.ours:
                        raise
                    del found[way]
                    self.setting.left_out(way.name, f"{type(error).__name__}: {error}")
                    continue
                readings.ok &= ok
                if turn >= WARM_UP:
                    readings.times.append(time)
        return found

    def _ids(self) -> tuple[Tensor, Tensor]:
        """Where the ways get them, and on the computing device for the check."""
        device = self.setting.device
        ids = distinct_ids(self.shape.n_rows, self.shape.n_ids, self._generator)
        if device.type != "cuda":
            return ids, ids
        there = ids.to(device)
        return (there if self.setting.ids_on_device else ids.pin_memory()), there

    def _read(self, way: Way) -> tuple[float, bool]:
        ids, there = self._ids()
        found: list[Tensor] = []
        time = self._timed(lambda: found.append(way.read(ids)))
        in_place = found[0].device.type == self.setting.device.type
        return time, in_place and same_words(found[0], contents(there, self.shape.n_words))

    def _write(self, way: Way) -> tuple[float, bool]:
        ids, there = self._ids()
        self._stamp += 1
        words = contents(there, self.shape.n_words).bitwise_xor_(_salt(self._stamp))
        rows = words.view(torch.float32)
        time = self._timed(lambda: way.write(ids, rows))
        return time, same_words(way.look(ids), words)

    def _timed(self, call: Callable[[], object]) -> float:
        synchronize(self.setting.device)
        clock = device_time if self.setting.clock == "gpu" else wall_time
        return clock(call, self.setting.device)


def measured(
    ways: Sequence[Way], shape: Shape, setting: ReachSetting, *, tier: Storage, direction: Direction
) -> Iterator[ReachRow]:
    """A row per way, in turns in one run."""
    for way, readings in Turns(shape, setting).take(ways, direction).items():
        p20, p50, p80 = percentiles(readings.times)
        speed = shape.n_ids * shape.row_bytes / (1e6 * p50)
        dma = setting.dma.to if direction == "read" else setting.dma.back
        yield ReachRow(
            benchmark=BENCHMARK,
            tier=tier,
            way=way.name,
            memory=way.memory,
            direction=direction,
            clock=setting.clock,
            table_bytes=shape.table_bytes,
            row_bytes=shape.row_bytes,
            n_ids=shape.n_ids,
            n_samples=setting.n_samples,
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            gb_per_s=speed,
            dma_gb_per_s=dma,
            share_of_dma=speed / dma,
            ok=readings.ok,
            machine=setting.machine,
        )
