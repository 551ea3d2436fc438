"""Records the signatures of vLLM that we rely on, from a wheel, without installing it:

python -m tests.vllm.signatures.record vllm-0.33.0-....whl

writes ``0.33.0.json`` beside this file: for each thing in `versions.RELIED_ON` and `OPTIONAL` its parameter names, or
null where the wheel has no such thing. For a class these are its annotated fields.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

from torch_delta.vllm.versions import OPTIONAL, RELIED_ON

HERE = Path(__file__).parent


def parameters(tree: ast.Module, name: str) -> list[str] | None:
    """Parameter names of a function, method or class of a module, looking into base classes of the same module."""
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if found is None:
            return None
        body = getattr(found, "body", [])
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        every = found.args
        names = [argument.arg for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
        return [*names, *(f"*{argument.arg}" for argument in (every.vararg, every.kwarg) if argument is not None)]
    return [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def main() -> None:
    for wheel in sys.argv[1:]:
        version = Path(wheel).name.split("-")[1].partition("+")[0]
        recorded: dict[str, list[str] | None] = {}
        with zipfile.ZipFile(wheel) as files:
            for reliance in (*RELIED_ON, *OPTIONAL):
                path = reliance.module.replace(".", "/")
                present = [name for name in (f"{path}.py", f"{path}/__init__.py") if name in files.namelist()]
                tree = ast.parse(files.read(present[0])) if present else None
                found = None if tree is None else parameters(tree, reliance.name)
                if tree is not None and found is None and _imports(tree, reliance.name):
                    found = []
                recorded[f"{reliance.module}:{reliance.name}"] = found
        (HERE / f"{version}.json").write_text(json.dumps(recorded, indent=2) + "\n")


def _imports(tree: ast.Module, name: str) -> bool:
    """Whether a module has a name from elsewhere; its signature is not looked up."""
    return any(
        alias.asname == name or alias.name == name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


if __name__ == "__main__":
    main()
