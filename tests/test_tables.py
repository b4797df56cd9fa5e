import csv
import io

import pytest

from terrafirma.tables import Table


@pytest.fixture
def table():
    return Table(("score", "AUROC"), [("a_b & c|d", "0.9"), ("<knn>", "0.8")], {(0, 1)})


def test_text_is_aligned_and_starred(table):
    assert str(table).splitlines() == ["score      AUROC", "a_b & c|d  0.9*", "<knn>      0.8"]
    assert len(table) == 2


def test_markdown_escapes_and_bolds(table):
    assert table.to_markdown() == "| score | AUROC |\n| --- | --- |\n| a_b & c\\|d | **0.9** |\n| <knn> | 0.8 |\n"


def test_latex_escapes_and_bolds(table):
    assert table.to_latex().splitlines() == [
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"score & AUROC \\",
        r"\midrule",
        r"a\_b \& c|d & \textbf{0.9} \\",
        r"<knn> & 0.8 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_paths_and_lines_survive():
    table = Table(("a|b",), [("C:\\guards\none",)])
    assert table.to_latex().splitlines()[4] == r"C:\textbackslash{}guards one \\"
    assert table.to_markdown() == "| a\\|b |\n| --- |\n| C:\\guards one |\n"


def test_csv_reads_back(table):
    assert list(csv.reader(io.StringIO(table.to_csv()))) == [["score", "AUROC"], ["a_b & c|d", "0.9"], ["<knn>", "0.8"]]


def test_html_escapes_and_bolds(table):
    html = table._repr_html_()
    assert "<td>&lt;knn&gt;</td>" in html
    assert "<td><b>0.9</b></td>" in html


def test_no_rows():
    assert str(Table(("score",), [])) == "score"
