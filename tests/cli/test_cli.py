import csv
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

import terrafirma
from terrafirma.cli.app import app

pytestmark = pytest.mark.jit


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, run as a user runs it."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "terrafirma", "demo", "-o", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


def test_the_demo_writes_pictures_and_tables(demo):
    folder, _ = demo
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["digits.csv", "digits.png", "digits.svg", "half_moons.png", "half_moons.svg", "results.json"]
    for png in folder.glob("*.png"):
        data = png.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
        assert width > 1500
        assert height > 500
    for svg in folder.glob("*.svg"):
        assert ET.parse(svg).getroot().tag.endswith("svg")  # noqa: S314


def test_the_demo_can_print_one_document(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "terrafirma", "demo", "--json", "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == json.loads((tmp_path / "out" / "results.json").read_text())


def test_the_demo_prints_what_it_writes(demo):
    folder, text = demo
    with (folder / "digits.csv").open() as file:
        rows = list(csv.DictReader(file))
    results = json.loads((folder / "results.json").read_text())
    assert [r["score"] for r in rows] == ["subfunction bound", "max response", "entropy", "margin"]
    for row, stored in zip(rows, results["digits"]["scores"], strict=True):
        assert float(row["auroc_wrong"]) == stored["auroc_wrong"]["value"]
        assert float(row["auroc_wrong_low"]) == stored["auroc_wrong"]["low"] < stored["auroc_wrong"]["high"]
        assert float(row["accuracy_refusing_30"]) == stored["accuracy"][3]
        line = next(x for x in text.splitlines() if x.startswith(row["score"]))
        printed = [float(x) for x in re.findall(r"\d\.\d{3}", line)]
        numbers = [
            float(v)
            for k, v in row.items()
            if k.startswith(("auroc", "aucea", "acc")) and not k.endswith(("low", "high"))
        ]
        assert printed == [round(x, 3) for x in numbers]
    assert f"{results['half_moons']['linear_regions']} linear" in text
    assert str(folder) in text


def test_the_demo_is_the_same_every_time(demo, tmp_path):
    folder, _ = demo
    assert CliRunner().invoke(app, ["demo", "-o", str(tmp_path)]).exit_code == 0
    for name in ("results.json", "digits.csv", "half_moons.svg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"terrafirma {terrafirma.__version__}"
    assert "demo" in CliRunner().invoke(app, ["--help"]).output


def test_files_in_the_way_are_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    run = subprocess.run(
        [sys.executable, "-m", "terrafirma", "demo", "-o", str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "error:" in run.stderr
    assert "File exists" in run.stderr
    assert "Traceback" not in run.stderr


def test_errors_are_one_sentence(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "terrafirma", "demo", "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TERRAFIRMA_THREADS": "many"},
    )
    assert run.returncode == 1
    assert "error: TERRAFIRMA_THREADS must be a positive integer. Got 'many'." in run.stderr
    assert "Traceback" not in run.stderr


def test_help_and_version_load_nothing_that_computes():
    code = "import sys; sys.argv = ['terrafirma', '--version']; from terrafirma.cli import main\n"
    code += "try: main()\nexcept SystemExit: print([m for m in ('numba', 'sklearn', 'matplotlib') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [f"terrafirma {terrafirma.__version__}", "[]"]
