"""Rules for the whole source tree: import order, unique names, one place for Triton and for the driver."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flatbed

SOURCE = Path(flatbed.__file__).parent
ROOT = Path(__file__).parents[1]
ORDER = [
    *("_version", "errors", "layout", "rule", "progress", "cuda", "kernels", "distributed", "tables", "data"),
    *("optim", "flat", "checkpoint", "captured_grads", "capture", "compat", "word2vec", "cost_model"),
    *("doctor", "cli", "__main__"),
]
"""Parts of the package, each importing only itself and parts before it."""

MODULES = {
    ".".join(("flatbed", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imported(tree: ast.Module) -> set[str]:
    """Modules that are imported anywhere in a file, except for type checkers."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                is_module = inner in MODULES and name.name not in flatbed.__all__  # tables is a function
                found.add(inner if is_module else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def part(module: str) -> str:
    return module.split(".")[1]


def test_imports_point_one_way() -> None:
    assert {part(module) for module in MODULES if module != "flatbed"} == set(ORDER)
    for module in MODULES.keys() - {"flatbed"}:
        for target in imported(TREES[module]) & MODULES.keys() - {"flatbed"}:
            assert ORDER.index(part(target)) <= ORDER.index(part(module)), f"{module} imports {target}"


def test_there_is_no_import_cycle() -> None:
    files = {module for module, path in MODULES.items() if path.name != "__init__.py"}
    graph = {module: (imported(TREES[module]) & files) - {module} for module in files}
    assert len(list(TopologicalSorter(graph).static_order())) == len(files)  # raises CycleError


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_triton_and_the_driver_have_one_place_each() -> None:
    found = {
        MODULES[module].parent.relative_to(SOURCE).as_posix()
        for module, tree in TREES.items()
        if any(name.split(".")[0] == "triton" for name in imported(tree))
    }
    assert found == {"kernels/_triton"}
    assert [m for m, path in MODULES.items() if "libcuda.so" in path.read_text()] == ["flatbed.cuda.driver"]


def test_storages_and_caches_are_told_apart_by_their_factory_only() -> None:
    pattern = re.compile(r"isinstance\([^)]*\b(\w*Storage|\w*Cache)\b")
    n_found = sum(len(pattern.findall(path.read_text())) for path in MODULES.values())
    assert n_found <= 5


@pytest.mark.parametrize("folder", ["src/flatbed/word2vec", "benchmarks", "examples"])
def test_users_of_the_package_import_public_names(folder: str) -> None:
    public = {"flatbed", "flatbed.optim", "flatbed.word2vec", "flatbed.compat", "flatbed.compat.speedtorch"}
    public |= {"flatbed.errors", "flatbed.progress", "flatbed.cost_model"}
    for path in (ROOT / folder).rglob("*.py"):
        private = {name for name in imported(ast.parse(path.read_text())) - public if name[:7] == "flatbed"}
        own = {name for name in private if "word2vec" in folder and name.startswith("flatbed.word2vec.")}
        assert private == own, path


def test_importing_is_light() -> None:
    """In steps, each of which may load more: the package, a silent progress, the commands, a training."""
    program = """
import sys, torch
before = set(sys.modules)
def loaded(*heavy):
    return {name for name in set(sys.modules) - before if name in heavy or name.split(".")[0] in heavy}

import flatbed, flatbed.progress
flatbed.progress.PATIENCE = 0.0
with flatbed.progress.progress("moving", 10, "rows") as advance:
    advance(5)
assert not loaded("triton", "typer", "rich", "matplotlib", "cuda")
assert not loaded("torch._dynamo", "torch.distributed.tensor")
assert not torch.cuda.is_initialized()
import flatbed.cli
assert not loaded("matplotlib", "triton", "flatbed.doctor")
from flatbed.word2vec import Corpus, Settings, Trainer
Trainer(Corpus.from_sentences([["a", "b"]] * 50), Settings(dim=4, device="cpu", subsample=0)).run()
assert not loaded("torch._dynamo")
import tempfile
emb, folder = flatbed.Embedding(10, 4), tempfile.mkdtemp()
optimizer = flatbed.optim.Adam(emb)
flatbed.save_checkpoint(folder, emb, optimizer)
flatbed.load_checkpoint(folder, emb, optimizer)
assert not loaded("torch._dynamo")  # Control-C in its import would be the end of all saves
print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""},
    )
    assert (done.stdout, done.stderr) == ("light\n", "")


def test_public_names_are_few_and_documented() -> None:
    assert len(flatbed.__all__) <= 16
    for name in set(flatbed.__all__) - {"__version__"}:
        assert getattr(flatbed, name).__doc__, name


def test_the_map_in_contributing_has_every_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text[text.index("src/flatbed/") : text.index("benchmarks/   ")]
    files = [p.relative_to(SOURCE) for p in MODULES.values() if not p.name.startswith("_")]
    in_lists = ("optim/rules", "word2vec", "compat")  # named by folder, or without their suffix
    for path in files:
        name = path.stem if path.as_posix().startswith(in_lists) else path.name
        assert name in tree or path.parent.as_posix() == "optim/rules", f"{path} is not in CONTRIBUTING.md"
