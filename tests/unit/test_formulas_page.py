"""lessons/reference.md: as the docstrings say it now, complete, and a table whatever a docstring holds."""

import importlib.util
import re

import pytest

import course

LESSONS = course.ROOT / "lessons"
PAGE = (LESSONS / "reference.md").read_text(encoding="utf-8")
SPEC = importlib.util.spec_from_file_location("formulas_page", LESSONS / "reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its header."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| ")][2:]


def test_the_page_is_what_the_docstrings_say():
    assert reference.page() == PAGE, "a docstring or a lesson changed: run python lessons/reference.py"


def test_enough_of_both_and_each_row_complete():
    formulas, words = rows("Formulas"), rows("Words")
    assert len(formulas) >= 15 and len(words) >= 25
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in formulas + words)
    assert not [row[0] for row in words if row[3].strip() == "–"]
    assert [row[0].strip() for row in words] == sorted(reference.TERMS, key=str.lower)


def test_every_word_has_its_object():
    for word, name in reference.TERMS.items():
        room, module, *path = name.split(".")
        node = reference.ast.parse((reference.LIBRARY / room / f"{module}.py").read_text(encoding="utf-8"))
        for part in path:
            node = next((child for child in node.body if getattr(child, "name", None) == part), None)
            assert node, f"{word}: there is no {name}"
        assert reference.ast.get_docstring(node), f"{word}: {name} has no docstring"


def test_every_link_leads_to_a_file():
    found = re.findall(r"\]\(([^)]*)\)", PAGE)
    assert found and not [address for address in found if not (LESSONS / address).is_file()]


@pytest.mark.parametrize("formula", ["|p / q - 1|", "a\n    + b", "x | y\r\nz", "`a|b`"])
def test_no_formula_breaks_the_table(formula):
    docstring = f"Meaning | unit.\n\n    {formula}\n"
    lines = reference.table(("a", "b"), (formula, f"`{reference.formula(docstring)}`")).splitlines()
    assert len(lines) == 3 and all(len(re.split(r"(?<!\\)\|", line)) == 4 for line in lines)
