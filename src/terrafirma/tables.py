"""A table of short texts, to look at, and to carry to a spreadsheet, a page or a paper."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Table"]

LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "\n": " "}
)
MARKDOWN = str.maketrans({"|": "\\|", "\n": " "})


@dataclass(frozen=True)
class Table:
    """Column names and rows of texts; ``bold`` holds the (row, column) of what stands out.

    >>> print(Table(("score", "AUROC"), [("entropy", "0.93"), ("knn", "0.91")], bold={(0, 1)}))
    score    AUROC
    entropy  0.93*
    knn      0.91
    """

    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] | set[tuple[int, int]] = frozenset()

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [self.names, *([self._starred(i, j) for j in range(len(self.names))] for i in range(len(self.rows)))]
        widths = [max(len(row[j]) for row in cells) for j in range(len(self.names))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return "\n".join(line.rstrip() for line in lines)

    def to_markdown(self) -> str:
        """For pages; what stands out is bold."""
        rows = self._marked(lambda text: text.translate(MARKDOWN), "**{}**")
        head = [[name.translate(MARKDOWN) for name in self.names], ["---"] * len(self.names)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows]) + "\n"

    def to_latex(self) -> str:
        """For papers, with booktabs' rules; what stands out is bold."""
        rows = self._marked(lambda text: text.translate(LATEX), r"\textbf{{{}}}")
        head = " & ".join(name.translate(LATEX) for name in self.names) + r" \\"
        body = [" & ".join(row) + r" \\" for row in rows]
        columns = "l" * len(self.names)
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([*lines, r"\end{tabular}", ""])

    def to_csv(self) -> str:
        """For spreadsheets; nothing stands out."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.names, *self.rows])
        return text.getvalue()

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.names)
        rows = self._marked(html.escape, "<b>{}</b>")
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _starred(self, i: int, j: int) -> str:
        return self.rows[i][j] + ("*" if (i, j) in self.bold else "")

    def _marked(self, escape: Callable[[str], str], mark: str) -> Iterator[list[str]]:
        for i, row in enumerate(self.rows):
            yield [mark.format(escape(cell)) if (i, j) in self.bold else escape(cell) for j, cell in enumerate(row)]
