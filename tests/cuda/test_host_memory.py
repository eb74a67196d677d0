"""Host memory: kinds, limits, forks, and freeing."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from flatbed.cuda import driver as cuda_driver
from flatbed.cuda import host_memory as memory
from flatbed.cuda.driver import DriverError
from flatbed.cuda.host_memory import HostMemory, allocate, available_bytes
from flatbed.errors import FlatbedError
from tests import programs

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MIB, GIB = 1 << 20, 1 << 30
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def status(name: str) -> int:
    """Bytes of VmSize, VmRSS …"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def in_child(work: Callable[[], bool]) -> bool:
    """True if `work` is true in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def raises(work: Callable[[], object], text: str) -> bool:
    try:
        work()
    except FlatbedError as error:
        return text in str(error)
    return False


# The CPU's


@pytest.mark.parametrize("nbytes", [0, 1000, 5 * MIB + 1])
def test_memory_is_zero_and_writable(nbytes: int) -> None:
    held = allocate(nbytes, device=CPU)
    assert (held.kind, held.addressable) == ("plain", True)
    assert held.tensor.shape == (nbytes,)
    assert held.tensor.dtype is torch.uint8
    assert not held.tensor.any()
    assert held.tensor.data_ptr() % mmap.PAGESIZE == 0
    held.tensor.fill_(7)
    assert (held.tensor == 7).all()
    held.check()
    held.close()
    held.close()
    with pytest.raises(FlatbedError, match="closed"):
        held.check()
    with pytest.raises(FlatbedError, match="closed"):
        _ = held.tensor


@linux
def test_memory_is_exactly_sized_untouched_and_goes_with_the_last_view() -> None:
    def work() -> bool:
        size, resident = status("VmSize"), status("VmRSS")
        held = allocate(GIB + 1, device=CPU)
        assert abs(status("VmSize") - size - GIB) < 4 * MIB
        assert status("VmRSS") - resident < 64 * MIB
        assert held.tensor.data_ptr() % memory.HUGE_PAGE == 0
        view = held.tensor[GIB // 2 :][: 40 * 4].view(torch.int32)
        held.close()
        del held
        gc.collect()
        assert status("VmSize") - size > GIB - MIB
        view.fill_(5)
        del view
        return abs(status("VmSize") - size) < MIB

    gc.collect()
    assert in_child(work)  # where no thread of another test allocates or ends


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(
        FlatbedError, match=r"1,125,899,906,842,624 bytes .* are available; use fewer rows"
    ) as caught:
        allocate(1 << 50, device=CPU)
    assert 'storage="disk"' in str(caught.value)


@linux
def test_forked_child_neither_touches_nor_frees() -> None:
    held = allocate(4 * MIB, device=CPU)
    held.tensor.fill_(9)
    address = held.tensor.data_ptr()
    holder = [held]

    def work() -> bool:
        refused = raises(held.check, "forked child") and raises(lambda: held.tensor, "forked child")
        mapped = f"{address:x}-" in Path("/proc/self/maps").read_text()
        # What the child maps there itself must outlive the parent's objects.
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        fresh = memory._libc().mmap(address, 4 * MIB, access, flags, -1, 0)
        holder.pop().close()
        gc.collect()
        ctypes.memset(fresh, 1, 4 * MIB)
        return refused and not mapped and fresh == address

    assert in_child(work)
    assert (held.tensor == 9).all()


# How much there is


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_limits_of_cgroups(tmp_path: Path) -> None:
    group(tmp_path / "a", max=1000, current=700, stat="anon 500\nactive_file 30\ninactive_file 60")
    group(tmp_path / "a/b", max="max", current=650, stat="active_file 1\ninactive_file 2")
    (tmp_path / "self").write_text("0::/a/b\n")
    assert list(memory._cgroup_bytes(tmp_path / "self", tmp_path)) == [390]
    top, old = tmp_path / "memory", ("limit_in_bytes", "usage_in_bytes", "stat")
    files = "total_active_file 1\ntotal_inactive_file 2"
    group(top, **dict(zip(old, (2**63, 13, files), strict=True)))
    group(top / "a", **dict(zip(old, (500, 100, files), strict=True)))
    (tmp_path / "self").write_text("5:cpu:/other\n4:hugetlb,memory:/a/not/seen/here\n0::/\n")
    assert list(memory._cgroup_bytes(tmp_path / "self", tmp_path)) == [403, 2**63 - 10]
    assert list(memory._cgroup_bytes(tmp_path / "missing", tmp_path)) == []
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert 0 < available_bytes() <= total


# What is asked for


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FLATBED_HOST_MEMORY", "fast", "managed, registered, pageable"),
        *(("FLATBED_MANAGED_LIMIT", value, '"free" or a number') for value in ("all", "-1", "1e9", "²")),
    ],
)
def test_unknown_settings(name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}' .* expected .*{expected}"):
        allocate(10, device=CPU)


# A GPU's, with a driver that only pretends


START_DRIVER = cuda_driver.driver


def fake_driver() -> mock.Mock:
    """A driver that records its calls; its managed memory is not zero at first."""
    fake = mock.Mock(maps={})
    fake.can_manage.return_value = fake.can_register.return_value = True
    fake.free_bytes.return_value = 64 * MIB

    def managed(gpu: int, nbytes: int) -> int:
        made = mmap.mmap(-1, nbytes)
        made.write(b"\xff" * nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        fake.maps[address] = made
        return address

    fake.managed.side_effect = managed
    fake.free_managed.side_effect = lambda gpu, address: fake.maps.pop(address) and None
    return fake


def calls(fake: mock.Mock) -> list[str]:
    """Names of the calls that change something."""
    names = [call[0] for call in fake.method_calls]
    return [name for name in names if name not in ("can_manage", "can_register", "free_bytes")]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    fake = fake_driver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    monkeypatch.setattr(memory, "_has_warned", False)
    monkeypatch.setattr(memory, "_free_at_exit", lambda: None)
    monkeypatch.delenv("FLATBED_HOST_MEMORY", raising=False)
    monkeypatch.delenv("FLATBED_MANAGED_LIMIT", raising=False)
    yield fake
    memory._free_all()


def chosen(kind: str, nbytes: int) -> HostMemory:
    """Memory of this kind."""
    with mock.patch.dict(os.environ, FLATBED_HOST_MEMORY=kind):
        return allocate(nbytes, device=GPU)


def test_managed_memory_comes_first(driver: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "POPULATE", 2 * MIB)
    held = allocate(5 * MIB, device=GPU)
    assert (held.kind, held.tensor.nbytes, held.addressable) == ("managed", 5 * MIB, True)
    assert not held.tensor.any()
    assert calls(driver) == ["managed", "populate", "populate", "populate"]
    held.close()
    held.close()
    assert calls(driver)[4:] == ["free_managed"]


@pytest.mark.parametrize("failing", ["can_manage", "managed", "populate"])
def test_registered_memory_comes_next(driver: mock.Mock, failing: str) -> None:
    if failing == "can_manage":
        driver.can_manage.return_value = False
    else:
        getattr(driver, failing).side_effect = DriverError
    held = allocate(5 * MIB, device=GPU)
    assert (held.kind, held.addressable) == ("registered", True)
    assert not held.tensor.any()
    assert not driver.maps
    view = held.tensor[10:]
    held.close()
    assert calls(driver)[-1] == "register"
    del view
    assert calls(driver)[-1] == "unregister"
    assert not memory._live


def test_pageable_memory_comes_last_with_one_warning(driver: mock.Mock) -> None:
    driver.can_manage.return_value = False
    driver.register.side_effect = DriverError("register failed")
    with pytest.warns(
        UserWarning, match="staged through the CPU.*slower.*managed: .*registered: register failed"
    ):
        held = allocate(10, device=GPU)
    assert (held.kind, held.addressable) == ("pageable", False)
    assert not held.tensor.any()
    assert allocate(10, device=GPU).kind == "pageable"


@pytest.mark.usefixtures("driver")
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(cuda_driver, "_load", lambda: None)
    monkeypatch.setattr(cuda_driver, "driver", START_DRIVER)
    with pytest.warns(UserWarning, match="libcuda"):
        assert allocate(10, device=GPU).kind == "pageable"
    with pytest.raises(FlatbedError, match="libcuda"):
        chosen("registered", 10)


def test_kind_can_be_chosen(driver: mock.Mock) -> None:
    for kind in ("managed", "registered", "pageable"):
        assert chosen(kind, 10).kind == kind
    driver.can_manage.return_value = driver.can_register.return_value = False
    for kind in ("managed", "registered"):
        with pytest.raises(FlatbedError, match=f"no {kind} memory of 10 bytes for cuda:0"):
            chosen(kind, 10)


@pytest.mark.parametrize("limit", ["free", str(64 * MIB)])
def test_managed_memory_has_a_limit(driver: mock.Mock, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATBED_MANAGED_LIMIT", limit)
    first, second = allocate(40 * MIB, device=GPU), allocate(40 * MIB, device=GPU)
    assert (first.kind, second.kind) == ("managed", "registered")
    assert allocate(24 * MIB, device=GPU).kind == "managed"
    with pytest.raises(FlatbedError, match=f"FLATBED_MANAGED_LIMIT={limit} allows 67,108,864 bytes"):
        chosen("managed", 40 * MIB)
    first.close()
    assert allocate(40 * MIB, device=GPU).kind == "managed"


@linux
def test_forked_child_leaves_the_driver_alone(driver: mock.Mock) -> None:
    held = [chosen(kind, 4 * MIB) for kind in ("managed", "registered")]

    def work() -> bool:
        driver.reset_mock()
        refused = all(raises(one.check, "forked child") for one in held)
        memory._free_all()
        held.clear()
        gc.collect()
        return refused and not calls(driver)

    assert in_child(work)
    assert all(not one.tensor.any() for one in held)


def test_everything_is_freed_at_exit() -> None:
    script = """
import atexit
from tests.cuda.test_host_memory import calls, chosen, cuda_driver, fake_driver

atexit.register(lambda: print(calls(driver)))
driver = fake_driver()
cuda_driver.driver = lambda: driver
held = [chosen(kind, 10) for kind in ("managed", "registered", "pageable")]
driver.reset_mock()
"""
    assert programs.run(script).stdout == "['free_managed', 'unregister']\n"


# A GPU's, in earnest. Little memory: more than the GPU has free could hang it.


def on_gpu(held: HostMemory) -> torch.Tensor:
    """Let torch's own kernels use memory by its address."""
    interface = {
        "data": (held.tensor.data_ptr(), False),
        "shape": (held.tensor.nbytes // 4,),
        "typestr": "<i4",
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__={**interface, "version": 3}), device=GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["managed", "registered"])
def test_kernels_and_cpu_share_memory(kind: str) -> None:
    held = chosen(kind, 64 * MIB)
    assert (held.kind, held.addressable) == (kind, True)
    assert not held.tensor.any()
    seen = on_gpu(held)
    assert seen.device == GPU
    assert seen.data_ptr() == held.tensor.data_ptr()
    assert not seen.any().item()

    numbers = held.tensor.view(torch.int32)
    numbers.copy_(torch.arange(len(numbers), dtype=torch.int32))
    ids = torch.randperm(len(numbers), device=GPU)
    assert torch.equal(seen[ids], ids.int())  # a kernel that gathers
    seen[ids] = -ids.int()  # and one that scatters
    torch.cuda.synchronize()
    assert torch.equal(numbers, -torch.arange(len(numbers), dtype=torch.int32))
    del seen, ids
    held.close()


def gpu_bytes_of_managed_memory() -> int:
    """Use managed memory on both sides; returns how much less memory of the GPU is free then."""
    before = torch.cuda.mem_get_info(GPU)[0]
    held = allocate(GIB, device=GPU)
    assert held.kind == "managed"
    held.tensor.view(torch.int32).fill_(1)
    seen = on_gpu(held)
    for _ in range(2):
        assert seen.sum(dtype=torch.int64).item() == GIB // 4
        seen.add_(0)
    torch.cuda.synchronize()  # otherwise the host writes beside the GPU
    held.tensor[:MIB].fill_(0)
    assert seen.sum(dtype=torch.int64).item() == (GIB - MIB) // 4
    torch.cuda.empty_cache()  # sums of other dtypes make copies
    return before - torch.cuda.mem_get_info(GPU)[0]


@pytest.mark.gpu
def test_managed_memory_stays_on_the_host() -> None:
    """Other processes take memory of the GPU, too, but not half as much in each of thirty attempts."""
    torch.ones(1, device=GPU).sum().item()
    assert any(gpu_bytes_of_managed_memory() < GIB // 2 for _ in range(30))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["managed", "registered", "pageable"])
def test_exit_is_clean_on_a_gpu(kind: str) -> None:
    script = """
import atexit, sys
import torch
from flatbed.cuda import host_memory as memory
from flatbed.cuda.host_memory import allocate
atexit.register(lambda: print(len(memory._live)))
held = allocate(32 << 20, device=torch.device("cuda"))
view = held.tensor[5:]
view.fill_(1)
cycle = [held, view]
cycle.append(cycle)
torch.ones(5, device="cuda").sum().item()
print(held.kind)
"""
    # Not by tests.programs, whose interpreters have no GPU.
    environment = {**os.environ, "FLATBED_HOST_MEMORY": kind}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{kind}\n0\n", "")
