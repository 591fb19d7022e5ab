"""lessons/troubleshooting.md quotes what the course says: each ```text line is in its source, each link and command exists."""

import ast
import re

import pytest

import course
from decodelab import cli

PAGE = course.ROOT / "lessons" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
SOURCES = [course.ROOT / "course.py", *sorted((course.ROOT / "lib" / "decodelab").rglob("*.py"))]
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
MESSAGES = [line for kind, block in FENCES if kind == "text" for line in block.splitlines() if line.strip()]
CODE = [block for _, block in FENCES] + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL))


def spoken(function: ast.AST) -> list[str]:
    """The strings of a function, implicit concatenation joined, an f-string's constant parts apart; docstrings are left out."""
    documented = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    return [
        node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
    ]


def functions() -> list[list[str]]:
    """What each function of the course can print."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    return [spoken(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


FUNCTIONS = functions()


def parts(message: str) -> list[str]:
    """What stands between the dots of a quoted message; spaces and signs at its ends may belong to what varies."""
    return [part for part in (piece.strip(" .,;:()'\"") for piece in message.split("…")) if part]


def said(message: str) -> bool:
    """Whether one function of the course holds all literal parts of a message."""
    return any(all(any(part in text for text in texts) for part in parts(message)) for texts in FUNCTIONS)


@pytest.mark.parametrize("message", MESSAGES)
def test_each_quoted_message_is_in_the_source(message):
    """A line of dots alone would always be found, so one part has a few words."""
    assert any(len(part.split()) > 2 for part in parts(message))
    assert said(message)


@pytest.mark.parametrize("message", MESSAGES)
def test_an_altered_message_is_not_found(message):
    """The search itself: each part with one letter changed is missed."""
    for part in parts(message):
        assert not said(message.replace(part, part[:-1] + "§"))


def test_fences_are_of_three_kinds():
    """text: this course; console: another program; none: something to type. No message stands outside them."""
    assert len(MESSAGES) > 20
    assert {kind for kind, _ in FENCES} == {"text", "console", ""}
    assert TEXT.count("```") == 2 * len(FENCES)


def test_links_commands_and_settings_exist():
    """Relative links lead to files, anchors to headings, commands to what the door and `decodelab` know."""
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)}
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", TEXT) if "://" not in link]
    assert [link for link in links if link[0] == "#" and link[1:] not in headings or link[0] != "#" and not (PAGE.parent / link).exists()] == []
    assert headings == {link[1:] for link in links if link[0] == "#"} | {"when-something-goes-wrong"}
    known = next(action.choices for action in cli.parser()._actions if action.dest == "command")
    for code in CODE:
        assert set(re.findall(r"course\.py ([\w-]+)", code)) <= set(course.COMMANDS)
        assert set(re.findall(r"^decodelab ([\w-]+)", code, re.MULTILINE)) <= set(known)
    settings = "".join(text for texts in FUNCTIONS for text in texts)
    assert [name for name in set(re.findall(r"DECODELAB_\w+", TEXT)) if name not in settings] == []
