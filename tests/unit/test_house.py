"""The house rules, read from the sources: sizes, import directions, what is caught, what the repository names."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "tokenmill"
MAX_FILE, MAX_FUNCTION = 400, 70

MODULES = {".".join(("tokenmill", *path.relative_to(SRC).with_suffix("").parts)): path for path in SRC.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in sorted(MODULES.items())}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def imports(name: str) -> set[str]:
    """All modules that a module imports, inside functions, too; `from tokenmill import x` counts as tokenmill.x."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            children = {f"{node.module}.{alias.name}" for alias in node.names}
            known = children & set(MODULES)
            found |= known or {node.module}
    return found


def own(name: str) -> set[str]:
    return {found for found in imports(name) if found.split(".")[0] == "tokenmill"}


def foreign(name: str) -> set[str]:
    """The third-party packages that a module imports."""
    return {found.split(".")[0] for found in imports(name)} - sys.stdlib_module_names - {"tokenmill"}


def within(found: set[str], *allowed: str) -> set[str]:
    """The imports that are none of the allowed modules and packages."""
    return {name for name in found if not any(name == a or name.startswith(f"{a}.") for a in allowed)}


def family(name: str) -> str:
    """The folder of a module below tokenmill; empty for the top level."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (SRC / parts[1]).is_dir() else ""


FAMILIES = {kind: [name for name in MODULES if family(name) == kind] for kind in {family(name) for name in MODULES}}


def functions(node: ast.AST) -> Iterator[Function]:
    return (found for found in ast.walk(node) if isinstance(found, Function))


def test_files_are_small() -> None:
    files = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in files.items() if lines > MAX_FILE} == {}


def test_functions_are_small() -> None:
    sizes = {
        f"{name}.{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree in TREES.items()
        for function in functions(tree)
    }
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FUNCTION} == {}


# -- directions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES["core"])
def test_core_stands_on_nothing(name: str) -> None:
    assert within(own(name), "tokenmill.core", "tokenmill.errors") == set()
    assert foreign(name) <= {"msgspec", "numpy"}


@pytest.mark.parametrize("name", FAMILIES["engines"])
def test_engines_know_core_and_each_other_only(name: str) -> None:
    assert within(own(name), "tokenmill.core", "tokenmill.engines", "tokenmill.errors") == set()
    assert foreign(name) <= {"msgspec", "prometheus_client", "xllamacpp"}


@pytest.mark.parametrize("name", FAMILIES["machine"])
def test_machine_knows_no_step(name: str) -> None:
    assert within(own(name), "tokenmill.machine", "tokenmill.errors") == set()


@pytest.mark.parametrize("name", FAMILIES[""])
def test_steps_know_no_concrete_plug_in(name: str) -> None:
    concrete = {
        found for found in own(name) if family(found) in ("engines", "formats") and found.split(".")[-1] != "base"
    }
    assert concrete == set()


def test_the_wheels_server_runs_in_an_environment_without_tokenmill() -> None:
    assert own("tokenmill.engines.llamacpp_server") == set()


def test_ray_stands_in_three_files_and_engine_packages_in_none() -> None:
    allowed = {f"tokenmill.cluster.{name}" for name in ("connection", "ray", "visit")}
    assert {name for name in MODULES if "ray" in foreign(name)} <= allowed
    assert {name for name in MODULES if foreign(name) & {"sglang", "vllm", "torch"}} == set()


def test_nothing_imports_the_scripted_server() -> None:
    users = {name for name in MODULES if any(family(found) == "testing" for found in own(name))}
    assert within(users, "tokenmill.testing") == set()


def names(words: list[str]) -> set[str]:
    """Requirements as bare names in the form of import names."""
    return {re.split(r"[^A-Za-z0-9._-]", word)[0].replace("-", "_").lower() for word in words}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDS = names(PROJECT["dependencies"])
IMPORTED = {"nvidia_ml_py" if found == "pynvml" else found for name in MODULES for found in foreign(name)}


def test_every_third_party_import_is_declared() -> None:
    extras = names(
        [word for kind, words in PROJECT["optional-dependencies"].items() if kind != "dev" for word in words]
    )
    assert IMPORTED - NEEDS - extras == set()


def test_every_declared_dependency_is_imported() -> None:
    assert set() == NEEDS - IMPORTED


# -- what the sources hold ---------------------------------------------------------------------------------------------
def test_everything_is_caught_in_two_places_only() -> None:
    broad = {
        f"{name}.{function.name}"
        for name, tree in TREES.items()
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type)
    }
    assert broad <= {"tokenmill.errors.boundary", "tokenmill.cli.main"}


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or (isinstance(one, ast.Name) and "Exception" in one.id) for one in kinds)


def test_sources_hold_no_leftovers_and_no_print() -> None:
    leftovers = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XXX)\b")
    assert [name for name, path in MODULES.items() if leftovers.search(path.read_text(encoding="utf-8"))] == []
    calls = [(name, node.func) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [name for name, call in calls if isinstance(call, ast.Name) and call.id == "print"] == []


def test_modules_say_what_they_own() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


DOCUMENTED = {
    part.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
    for part in node.body
    if isinstance(part, Function) and ast.get_docstring(part)
}
"""Methods that some class documents: the same name in another class is an override or a stand-in."""


def test_public_classes_and_functions_say_what_they_are_for() -> None:
    wanting: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        story = ast.get_docstring(tree) or ""
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        owners: list[ast.Module | ast.ClassDef] = [tree, *classes]
        own_functions = [node for owner in owners for node in owner.body if isinstance(node, Function)]
        silent = [node.name for node in classes if not (ast.get_docstring(node) or _is_told(name, node, story))]
        silent += [node.name for node in own_functions if not (ast.get_docstring(node) or _is_plain(node))]
        if silent:
            wanting[name] = silent
    assert wanting == {}


def _is_told(module: str, node: ast.ClassDef, story: str) -> bool:
    """A message of fields only, an error in the tree of its module's docstring, or the plug-in the module is about."""
    fields_only = all(isinstance(part, ast.AnnAssign | ast.Assign | ast.Pass) for part in node.body)
    sections = module == "tokenmill.config"  # data/init.toml explains them key by key
    return fields_only or sections or node.name in story or family(module) in ("engines", "formats")


def _is_plain(node: Function) -> bool:
    """Private, a property, one statement long, or what another class of the same shape documents."""
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    return node.name.startswith("_") or is_property or len(node.body) == 1 or node.name in DOCUMENTED


# -- what is loaded, what the repository names -------------------------------------------------------------------------
HEAVY = ("ray", "transformers", "pyarrow", "plotly", "torch", "pydantic", "aiohttp", "numpy", "huggingface_hub")


@pytest.mark.parametrize("code", ["import tokenmill", "import tokenmill.cli as c; c.main()"])
def test_import_and_help_load_nothing_heavy(code: str) -> None:
    tell = f"import sys, atexit; atexit.register(lambda: sys.stderr.write(repr(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", f"{tell}\n{code}", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "set()")


@cache
def texts() -> dict[str, str]:
    """The repository's own text files, by name."""
    found = {}
    for folder, inside, files in os.walk(ROOT):
        inside[:] = [name for name in inside if name not in SKIPPED and not name.endswith(("_cache", "cache__"))]
        for path in (Path(folder) / name for name in files if name != ".git"):  # a worktree has a file of that name
            try:
                found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


SKIPPED = frozenset({".git", ".venv", "build", "dist", ".hypothesis", ".gpu", ".whl", "runs", "quickstart", "env"})
"""As in .gitignore."""


def test_the_repository_names_no_machine_and_no_registry() -> None:
    named = re.compile(
        r"(?<![\w.])/(?:work|home)/|/tmp/w/|index" + r"-url|extra" + r"-index|artifactory|nexus\.|"
        r"https?://\d+\.\d+\.\d+\.\d+:\d+/(?:simple|repository)|\.\./sha" + r"red"
    )
    found = {name: named.findall(text) for name, text in texts().items() if name != "tests/unit/test_house.py"}
    assert {name: words for name, words in found.items() if words} == {}


def test_no_lock_file_is_kept() -> None:
    locks = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml", "package-lock.json"}
    assert [name for name in texts() if name.split("/")[-1] in locks] == []
