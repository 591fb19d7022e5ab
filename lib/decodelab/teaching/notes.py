"""Boxes whose numbers come from a cell: a takeaway is text with figures that were computed or measured a line above."""

import html
from dataclasses import dataclass


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
