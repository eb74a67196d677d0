"""Importing is light, and imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import flatbed

SOURCE = Path(flatbed.__file__).parent
ORDER = [
    *("_version", "errors", "layout", "rule", "progress", "cuda", "kernels", "distributed", "tables", "data"),
    *("optim", "flat", "checkpoint", "compat", "word2vec", "doctor", "cli", "__main__"),
]
RANK = {name: rank for rank, name in enumerate(ORDER)}


def part(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flatbed"):
            found |= {
                f"{node.module}.{a.name}" if node.module == "flatbed" else node.module for a in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("flatbed.")}
    return found


def test_imports_point_one_way() -> None:
    seen = 0
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("flatbed", *path.relative_to(SOURCE).with_suffix("").parts))
        if part(module) == "__init__":
            continue
        for target in imported(path):
            if part(target) not in RANK:
                continue  # a public name out of the package itself
            seen += 1
            assert RANK[part(target)] <= RANK[part(module)], f"{module} imports {target}"
    assert seen > 10


def test_triton_is_imported_in_one_folder() -> None:
    """Elsewhere only for the eyes of type checkers."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "triton" for name in names) and id(node) not in for_types:
                found.add(path.parent.relative_to(SOURCE).as_posix())
    assert found == {"kernels/_triton"}


def test_every_part_has_a_rank() -> None:
    parts = {
        p.stem if p.suffix == ".py" else p.name for p in SOURCE.iterdir() if p.suffix == ".py" or p.is_dir()
    }
    assert parts - {"__init__", "__pycache__", "__main__"} <= set(ORDER)


def test_importing_is_light() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import flatbed
heavy = {"triton", "typer", "rich", "matplotlib", "cuda", "torch._dynamo", "torch.distributed.tensor"}
loaded = {m for m in set(sys.modules) - before if m in heavy or m.split(".")[0] in heavy}
assert not loaded, loaded
assert not torch.cuda.is_initialized()
print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""},
    )
    assert done.stdout == "light\n", done.stderr


def test_public_names_are_documented() -> None:
    for name in flatbed.__all__:
        thing = getattr(flatbed, name)
        if name != "__version__":
            assert thing.__doc__, name
