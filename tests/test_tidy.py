"""The tree keeps its own rules: layers, sizes, names, docstrings."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("directory", "gateway", "nodeagent", "warmroute")
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60
README_LINES_MAX = 150
PROGRAM = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_layers_hold() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", PROGRAM, ids=name_of)
def test_a_module_is_documented_short_and_named_for_its_noun(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    assert text.count("\n") <= FILE_LINES_MAX
    assert path.stem not in {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES_MAX, node.name


def test_every_folder_of_tests_is_a_package() -> None:
    for folder in {path.parent for path in TESTS}:
        assert (folder / "__init__.py").exists(), folder


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") < README_LINES_MAX


def test_only_the_program_is_packaged() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)
