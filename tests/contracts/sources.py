"""The package's source for tests of the architecture: modules, imports and names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted: `aijobs.jobs.lifecycle`; a package's `__init__` is `aijobs.jobs`."""

    name: str
    path: Path
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path.name)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def at(self, line: int) -> str:
        """Return a place in the file for a failure's text."""
        return f"{self.path.relative_to(ROOT)}:{line}"


@dataclass(frozen=True)
class Import:
    """One imported name: for `from a.b import c`, it is `a.b.c` if that is a module of ours, otherwise `a.b`."""

    target: str
    line: int


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of the product: the package and `app.py`."""
    paths = [*sorted((ROOT / "aijobs").rglob("*.py")), ROOT / "app.py"]
    return tuple(Module(_name(path), path, path.read_text(encoding="utf-8")) for path in paths)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: Module, *, late: bool = True) -> list[Import]:
    """Return imports of `module` at run time, with `late` also those in functions; not those for type checkers only."""
    return [found for node in _running(module.tree, late) for found in _imported(module, node)]


def _running(node: ast.AST, late: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not late and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _running(other, late)
            continue
        yield child
        yield from _running(child, late)


def _imported(module: Module, node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        base = _base(module, node)
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            yield Import(whole if whole in module_names() else base, node.lineno)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    home = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    home = home[: len(home) - node.level + 1]
    return ".".join([*home, *([node.module] if node.module else [])])


def sample(source: str, name: str = "aijobs.web.sample") -> Module:
    """Return a module that isn't in the tree, to test a rule."""
    return Module(name, ROOT / "aijobs" / "web" / "sample.py", source)
