"""Markup of a table: Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
    }
)


def markdown(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str]
) -> str:
    """Return a pipe table between a bold caption and the footer as a list."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    body = [line(headings), line(["---"] * len(headings)), *map(line, rows)]
    return "\n".join([f"**{caption}**", "", *body, "", *(f"- {text}" for text in footer), ""])


def latex(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str]
) -> str:
    """Return a table float for the booktabs package, the footer set small below the body."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption.translate(_LATEX)}}}",
            rf"\begin{{tabular}}{{{'l' * len(headings)}}}",
            r"\toprule",
            line(headings),
            r"\midrule",
            *map(line, rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par\footnotesize {text.translate(_LATEX)}" for text in footer),
            r"\end{table}",
            "",
        ]
    )
