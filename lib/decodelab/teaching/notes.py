"""Boxes whose numbers come from a cell: a takeaway is text with figures that were computed or measured a line above."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from decodelab.arithmetic.records import html_table, text_table


@dataclass(frozen=True)
class Note:
    """A titled box in a notebook, plain text elsewhere."""

    title: str
    text: str

    def __repr__(self) -> str:
        return f"{self.title}. {self.text}"

    def _repr_html_(self) -> str:
        return f"<div class='alert alert-info'><b>{html.escape(self.title)}.</b> {html.escape(self.text)}</div>"


def takeaway(text: str) -> Note:
    """The one sentence of a section to carry away, with its number and unit."""
    return Note("Takeaway", text)


def misleads(text: str) -> Note:
    """How the number above could mislead."""
    return Note("How this number could mislead", text)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header: a plain table in a notebook, aligned columns elsewhere."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __repr__(self) -> str:
        return text_table(self.header, self.rows)

    def _repr_html_(self) -> str:
        return html_table(self.header, self.rows, caption=self.caption)
