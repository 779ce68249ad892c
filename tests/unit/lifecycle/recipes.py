"""The functions of examples/sources, for tests that run them against other servers than the programs do."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "examples" / "sources"
sys.path.append(str(FOLDER))  # for what the programs import from beside them


def definitions(program: str, *names: str) -> dict[str, Any]:
    """The functions and constants of these names, as a program writes them, without running anything else."""
    tree = ast.parse((FOLDER / f"{program}.py").read_text(encoding="utf-8")).body
    kept = [node for node in tree if _defines(node) & set(names)]
    used = {name.id for node in kept for name in ast.walk(node) if isinstance(name, ast.Name)}
    imports = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom) and _imports(node) & used]
    found: dict[str, Any] = {}
    exec(compile(ast.Module([*imports, *kept], type_ignores=[]), f"{program}.py", "exec"), found)
    return found


def _defines(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return {name}
    return set()


def _imports(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
