"""Every Python block of the documentation runs, every link to a file leads somewhere, every target of make exists."""

import re
from pathlib import Path

import pytest

from terrafirma import scores

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.jit
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scores, "OWN", {})  # what a block registers ends with it
    exec(compile(block, "block", "exec"), {})  # noqa: S102
    printed = [float(number) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    for claimed in re.findall(r"print\(.*\)  # .*?(\d\.\d+)", block):
        assert any(
            abs(number - float(claimed)) < 0.1 for number in printed
        )  # rounding trains each machine another network


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


def test_the_commands_of_the_readme_are_targets_of_make():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert commands == {"demo", "test"}
    assert commands <= targets


def test_the_table_of_scores_is_the_one_that_the_library_prints():
    assert scores.describe().to_markdown() in (ROOT / "docs" / "scores.md").read_text()
