"""House rules, held by code: light imports, exports, import direction, citations of the paper."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import terrafirma
from tests.conftest import DATA

SOURCE = Path(terrafirma.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOT = SOURCE.parent.parent
HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "pyarrow",
    "numba",
    "scipy",
    "sklearn",
    "matplotlib",
    "safetensors",
    "typer",
    "rich",
)

# what each room may import, besides itself
ROOMS = {
    "cli": {
        "experiments",
        "report",
        "guard",
        "comparison",
        "tables",
        "capture",
        "policy",
        "selection",
        "scores",
        "metrics",
        "recorded",
        "storage",
        "core",
        "errors",
    },
    "experiments": {"capture", "selection", "scores", "metrics", "core", "errors"},
    "comparison": {
        "guard",
        "capture",
        "scores",
        "resampling",
        "tables",
        "metrics",
        "recorded",
        "core",
        "errors",
    },
    "report": {"core", "metrics", "errors"},
    "guard": {"capture", "policy", "selection", "scores", "metrics", "recorded", "storage", "core", "errors"},
    "policy": {"metrics", "storage", "core", "errors"},
    "scores": {"capture", "selection", "recorded", "storage", "tables", "metrics", "core", "errors"},
    "selection": {"metrics", "core", "errors"},
    "resampling": {"metrics", "core"},
    "tables": set(),
    "capture": {"recorded", "storage", "core", "errors"},
    "recorded": {"storage", "core", "errors"},
    "metrics": {"core", "errors"},
    "storage": {"errors"},
    "core": {"errors"},
    "errors": set(),
}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_terrafirma_loads_numpy_and_nothing_heavier():
    code = f"import sys, terrafirma; print([m for m in {HEAVY} if m in sys.modules], 'numpy' in sys.modules)"
    assert run(code).strip() == "[] True"


def test_importing_terrafirma_is_fast():
    """Under 0.25 s more than numpy alone, at the best of five."""
    code = "import time, numpy; t = time.perf_counter(); import terrafirma; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.25


def test_import_changes_nothing_elsewhere():
    code = (
        "import warnings, numpy; f = list(warnings.filters), numpy.geterr(); import terrafirma; "
        "print(f == (list(warnings.filters), numpy.geterr()))"
    )
    assert run(code).strip() == "True"


def test_every_public_name_is_there_and_has_a_docstring():
    assert terrafirma.__all__ == sorted(terrafirma.__all__)
    assert dir(terrafirma) == terrafirma.__all__
    for name in terrafirma.__all__:
        value = getattr(terrafirma, name)
        if name != "__version__":
            assert value.__doc__
            assert value.__doc__.strip()


def test_documentation_and_exports_agree():
    page = (ROOT / "docs" / "api.md").read_text()
    for module, title in ((terrafirma, "terrafirma"), (terrafirma.metrics, "terrafirma.metrics")):
        section = page.split(f"## `{title}`\n")[1].split("\n## ")[0]
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(module.__all__)


def test_unknown_names_are_named():
    with pytest.raises(AttributeError, match="module 'terrafirma' has no attribute 'Guardian'. It has: "):
        terrafirma.Guardian  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_exports_exist_once(path):
    module = importlib.import_module(".".join(["terrafirma", *path.relative_to(SOURCE).with_suffix("").parts]))
    exports = getattr(module, "__all__", [])
    assert all(hasattr(module, name) for name in exports)
    assert sorted(exports) == sorted(set(exports))


def at_run_time(tree):
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_run_time(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room not in ROOMS:
        assert room in ("__init__", "__main__", "_version")
        return
    allowed = ROOMS[room] | {room, "_version"}
    for node in at_run_time(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("terrafirma"):
            module = node.module.split(".")
            names = [module[1]] if len(module) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("terrafirma.")]
        for name in names:
            assert name in allowed, f"{path.name}: {room} must not import {name}"


def test_the_core_knows_no_files_no_printing_and_no_torch():
    for path in (SOURCE / "core").glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not imported & {"torch", "pathlib", "json", "safetensors", "sklearn", "matplotlib", "rich", "typer"}
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not calls & {"print", "open", "input"}


def test_citations_are_labels_of_the_paper():
    labels = set((DATA / "paper_labels.txt").read_text().split())
    cited = {
        label
        for path in [*FILES, ROOT / "docs" / "notation.md"]
        for label in re.findall(r"\b((?:eq|thm|s|f|t|a|app|tab|fig):[a-z0-9_]+)", path.read_text())
    }
    assert {"eq:density", "thm:true_error", "a:algo"} <= cited
    assert cited <= labels


def test_the_text_speaks_of_the_project_alone():
    """No path of a machine in any file of the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.split():
        content = (ROOT / name).read_bytes() if (ROOT / name).exists() else b""
        assert not re.search(rb"(?<![\w.])/(?:home|root|work|Users)/", content), name
