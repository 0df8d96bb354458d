"""The layers, where torch may be imported, and the public names, held by machine.

The rules are those of ARCHITECTURE.md. The checker is a pure function over source text, so that
the tests at the end can show that it does object.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import stoker

SOURCE = Path(stoker.__file__).parent

# A package imports only from those on lines before its own; those on one line are strangers to each
# other, except errors and units, which are one layer.
LAYERS = [
    {"errors", "units"},
    {"timeline"},
    {"machine"},
    {"workload"},
    {"plan"},
    {"governor", "cache"},
    {"history"},
    {"doctor"},
    {"remedies"},
    {"script", "observe"},
    {"loader"},
    {"tune"},
    {"views"},
    {"integrations"},
    {"cli"},
]
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
ONE_LAYER = {"errors", "units"}
# Beyond the order: these must serve stock torch too, or be usable by any loader.
NEVER = {"doctor": {"loader"}, "views": {"loader"}, "governor": {"loader"}}

TORCH_ANYWHERE = {"observe", "loader", "tune", "remedies", "integrations"}
TORCH_IN_FUNCTIONS = {"workload"}

PUBLIC = [
    "DataLoader",
    "ElasticSampler",
    "Knobs",
    "LoaderStats",
    "StokerError",
    "WorkerDied",
    "__version__",
]


class Import(NamedTuple):
    """One imported module, and whether that happens while the importing module is loaded."""

    module: str
    line: int
    at_load: bool
    for_types: bool


def imports_of(source: str) -> Iterator[Import]:
    """Every import in `source`; `from stoker import plan` counts as an import of stoker.plan."""

    def walk(node: ast.AST, at_load: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_load, for_types)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{a.name}" for a in node.names] if module == "stoker" else [module]
            for name in names:
                yield Import(name, node.lineno, at_load, for_types)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, at_load, True)
            for child in node.orelse:
                yield from walk(child, at_load, for_types)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_load and not inside, for_types)

    yield from walk(ast.parse(source), at_load=True, for_types=False)


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the file of `module`, one line each."""
    found = []
    package = module.split(".")[1] if "." in module else ""
    if not ast.get_docstring(ast.parse(source)):
        found.append(f"{module}: has no docstring that says what it does")
    if package and package not in RANK:
        return [*found, f"{module}: stoker.{package} has no place in the layers"]
    for imported in imports_of(source):
        where = f"{module}, line {imported.line}"
        top, _, rest = imported.module.partition(".")
        if top == "":
            found.append(f"{where}: a relative import; write the whole name")
        elif top == "stoker" and package:
            found += _layer_faults(where, package, rest.split(".")[0])
        elif top == "torch" and not imported.for_types and not _torch_allowed(package, imported):
            found.append(f"{where}: imports torch, which {package or 'the surface'} may not")
    if not package:
        # The surface names what lives in every layer, but only for a type checker.
        found += [
            f"{module}, line {imported.line}: loads {imported.module} at once; must be lazy"
            for imported in imports_of(source)
            if imported.module.startswith("stoker.") and not imported.for_types
        ]
    return found


def _layer_faults(where: str, package: str, target: str) -> list[str]:
    if target not in RANK:
        return []  # a name of the surface itself, such as __version__
    if target in NEVER.get(package, set()):
        return [f"{where}: {package} never imports {target}"]
    if target == package or {target, package} <= ONE_LAYER or RANK[target] < RANK[package]:
        return []
    return [f"{where}: {package} imports {target}, which is not before it"]


def _torch_allowed(package: str, imported: Import) -> bool:
    return package in TORCH_ANYWHERE or (package in TORCH_IN_FUNCTIONS and not imported.at_load)


def module_name(path: Path) -> str:
    parts = ("stoker", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_after(statement: str) -> set[str]:
    """What is in sys.modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_a_module_keeps_to_its_layer(path: Path) -> None:
    assert faults(module_name(path), path.read_text()) == []


# rich is slow to import as well; --help loads it only when it draws.
LIGHT = ["stoker", "stoker.errors", "stoker.units", "stoker.cli", "stoker.machine", "stoker.plan"]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_what_must_be_quick_does_not_load_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not {"torch", "numpy", "rich"} & loaded


def test_public_names_are_these_and_sorted() -> None:
    assert stoker.__all__ == sorted(PUBLIC, key=str.casefold)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(stoker, name) is not None
    assert name in dir(stoker)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        _ = stoker.Loader


# --- the checker itself -------------------------------------------------------------------------

DOC = '"""Says what it does."""\n'


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("stoker.plan.tiers", "import stoker.loader.pool", "plan imports loader"),
        ("stoker.plan.tiers", "from stoker.loader import pool", "plan imports loader"),
        ("stoker.plan.tiers", "from stoker import loader", "plan imports loader"),
        ("stoker.plan.tiers", "def f():\n    import stoker.tune", "plan imports tune"),
        ("stoker.cache.disk", "import stoker.governor", "cache imports governor"),
        ("stoker.views.text", "import stoker.loader.stats", "views never imports loader"),
        ("stoker.doctor.rules", "import stoker.loader", "doctor never imports loader"),
        ("stoker.governor.loop", "import stoker.loader", "governor never imports loader"),
        ("stoker.errors", "import stoker.machine", "errors imports machine"),
        ("stoker.plan.tiers", "import torch", "imports torch"),
        ("stoker.machine.gpu", "def f():\n    from torch import cuda", "imports torch"),
        ("stoker.workload.probe", "import torch.utils.data", "imports torch"),
        ("stoker.cli.demo", "def f():\n    import torch", "imports torch"),
        ("stoker.cli.demo", "if True:\n    import torch", "imports torch"),
        ("stoker.loader.pool", "from .arena import Arena", "a relative import"),
        ("stoker.loader.pool", "from . import arena", "a relative import"),
        ("stoker.common.things", "", "has no place in the layers"),
        ("stoker", "from stoker.errors import StokerError", "must be lazy"),
        ("stoker", "import torch", "imports torch"),
    ],
)
def test_the_checker_objects(module: str, source: str, complaint: str) -> None:
    assert [fault for fault in faults(module, DOC + source) if complaint in fault]


def test_the_checker_objects_to_a_module_without_a_docstring() -> None:
    assert faults("stoker.units", "import math") == [
        "stoker.units: has no docstring that says what it does"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stoker.loader.pool", "import torch\nfrom stoker.loader.arena import Arena"),
        ("stoker.workload.probe", "def f():\n    import torch"),
        (
            "stoker.plan.tiers",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        ),
        ("stoker.units", "def f():\n    from stoker.errors import ConfigError"),
        ("stoker.cli", "from stoker import __version__"),
        ("stoker.cli.plan", "from stoker.views import text\nfrom stoker.loader import stats"),
        ("stoker.loader.pool", "import torchdata_like_name, os"),
    ],
)
def test_the_checker_accepts(module: str, source: str) -> None:
    assert faults(module, DOC + source) == []
