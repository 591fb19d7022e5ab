"""The pytest plugin behind `python course.py check LAB`: grade a learner's lab by the check cells of labs/solutions.

A lab is matched to its solution by file name, a cell by its grade_id. What the learner's copy holds in a check cell,
its tags and its outputs do not count. Code in the same kernel can always cheat: this is a self-check.
"""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import IPyNbFile

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = ROOT / "labs" / "solutions"
SELF_CHECK = "A self-check: your code and the checks share one kernel."

AFRESH = """from importlib import import_module as _import, reload as _reload
for _name in ("arithmetic.cost", "arithmetic.planning", "arithmetic.speculation", "teaching.exercises"):
    exercises = _reload(_import(f"decodelab.{_name}"))
"""
"""Put before each check, so that the library's own is called whatever the notebook bound to these names; labs/exercises.py is read again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--i-trust-these", action="store_true", help="grade notebooks from outside the course's folder")


def pytest_configure(config: pytest.Config) -> None:
    config.option.tbstyle, config.option.reportchars = "no", ""  # pytest_terminal_summary says it in one line each


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator:
    found = yield
    return [Lab.from_parent(parent, path=file_path)] if file_path.suffix == ".ipynb" else found


class Fault(pytest.Item):
    """A reason why a file cannot be graded as it is."""

    def runtest(self) -> None:
        raise AssertionError(self.name)


class Lab(IPyNbFile):
    """A learner's notebook whose check cells are replaced by those of its solution."""

    def collect(self) -> Iterator[pytest.Item]:
        if fault := _unfit(self.path, trusted=self.config.option.i_trust_these):
            yield Fault.from_parent(self, name=fault)
            return
        wanted = graded(SOLUTIONS / self.path.stem / self.path.name)
        for fault in _misplaced(self.path, wanted):
            yield Fault.from_parent(self, name=fault)
        for item in super().collect():
            item.cell.update(outputs=[], execution_count=None)  # the learner's results are not compared
            cell = wanted.get(_grade_id(item.cell))
            if cell is not None and cell.metadata.nbgrader.grade:
                item.cell = deepcopy(cell)
                item.cell.source = AFRESH + cell.source
                item.options.clear()
                item.options.update(check=True)
            yield item


def graded(notebook: Path) -> dict[str, nbformat.NotebookNode]:
    """The solution and check cells of a notebook by grade_id."""
    cells = nbformat.read(str(notebook), as_version=4).cells
    return {_grade_id(cell): cell for cell in cells if _grade_id(cell)}


def _grade_id(cell: nbformat.NotebookNode) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id", "") if cell.cell_type == "code" else ""


def _unfit(path: Path, *, trusted: bool) -> str:
    """Why this file cannot be graded at all; "" if it can."""
    if not (SOLUTIONS / path.stem / path.name).exists():
        known = ", ".join(sorted(folder.name for folder in SOLUTIONS.iterdir() if folder.is_dir()))
        return f"no lab has this name. Labs are matched by file name; there are: {known}"
    if not trusted and ROOT not in path.resolve().parents:
        return (
            "it lies outside the course's folder, and grading runs its code with your rights. "
            "Is it yours? Add --i-trust-these. Is it not? Grade it in a container."
        )
    try:
        nbformat.read(str(path), as_version=4)
    except Exception as fault:
        return f"not a notebook that can be read: {str(fault).splitlines()[0][:120]}"
    return ""


def _misplaced(path: Path, wanted: dict) -> list[str]:
    """One line per graded cell that the learner's copy lacks or holds more than once."""
    found = Counter(_grade_id(cell) for cell in nbformat.read(str(path), as_version=4).cells)
    missing = [f"{name}: this cell is missing; copy it back from labs/{path.name}" for name in wanted if not found[name]]
    return missing + [f"{name}: this cell is there {found[name]} times; keep one" for name in wanted if found[name] > 1]


# ---- one line per result -------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator:
    report = yield
    if report.failed:
        report.longrepr = f"{item.path.name} - {_reason(item, call.excinfo.value)}"
    elif call.when == "call" and report.passed and _exercise(item):
        report.verdict = f"{item.path.name} - {_printed(item)}"
    return report


def _reason(item: pytest.Item, error: BaseException) -> str:
    """What went wrong in one line: the check's own words, else the cell and the error."""
    where = _exercise(item) or f"code cell {getattr(item, 'cell_num', -1) + 1}"
    if isinstance(item, Fault):
        return str(error)
    raised = [output for output in getattr(item, "test_outputs", None) or [] if output.output_type == "error"]
    if raised and raised[0].ename == "AssertionError" and raised[0].evalue.startswith(where):
        return raised[0].evalue.splitlines()[0]
    if raised and raised[0].ename != "KeyboardInterrupt":  # that is how nbval ends a cell that takes too long
        return f"{where}: {raised[0].ename}: {raised[0].evalue}".strip().splitlines()[0]
    printed = _printed(item)
    return printed if printed.startswith(where) else f"{where}: {str(error).splitlines()[0]}"


def _exercise(item: pytest.Item) -> str:
    """The exercise that a check cell checks; "" for every other cell."""
    grade_id = _grade_id(item.cell) if hasattr(item, "cell") else ""
    return grade_id.removeprefix("check_") if grade_id.startswith("check_") else ""


def _printed(item: pytest.Item) -> str:
    """The first line that a cell printed."""
    text = "".join(o.text for o in getattr(item, "test_outputs", None) or [] if o.output_type == "stream")
    return text.strip().split("\n")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    lines = [report.verdict for report in stats.get("passed", []) if hasattr(report, "verdict")]
    lines += [str(report.longrepr) for outcome in ("failed", "error") for report in stats.get(outcome, [])]
    for line in [*lines, SELF_CHECK]:
        terminalreporter.write_line(line)
