"""The notebook contract: student labs follow their sources, and `course.py check` grades what it should.

The grading runs start real kernels, on copies of the labs cut down to their exercises; three labs share a run.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.nbgraderformat import MetadataValidator

from labs import make_student
from test_exercises import EXERCISES, learners

ROOT = Path(__file__).resolve().parents[2]
SOURCES = make_student.sources()
LESSONS = sorted(ROOT.glob("lessons/*.ipynb"))
NOTEBOOKS = [*LESSONS, *SOURCES, *SOURCES.values()]
LAB = "00_your_machine.ipynb"
MACHINE, GROWTH, SATURATION = (ROOT / "labs" / f"{name}.ipynb" for name in ("00_your_machine", "03_token_cost_growth", "05_bandwidth_saturation"))
SOLVED = SOURCES[MACHINE]

EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.relative_to(ROOT).as_posix() for path in NOTEBOOKS])
EACH_SOURCE = pytest.mark.parametrize("path", SOURCES.values(), ids=[path.name for path in SOURCES.values()])


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(str(path), as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def mark(cell: nbformat.NotebookNode) -> dict:
    return cell.metadata.get("nbgrader", {})


# ---- student labs and their sources --------------------------------------------------------------------------------


def test_student_labs_are_current():
    assert SOURCES and not make_student.stale(), "run: python labs/make_student.py"


def test_a_changed_source_makes_its_student_lab_stale(tmp_path):
    source = tmp_path / "solutions" / "00_your_machine" / LAB
    source.parent.mkdir(parents=True)
    source.write_text(SOLVED.read_text(encoding="utf-8"), encoding="utf-8")
    assert make_student.stale(tmp_path) == [f"{LAB}: missing"]
    (tmp_path / LAB).write_text(make_student.student_copy(source), encoding="utf-8")
    assert make_student.stale(tmp_path) == []
    source.write_text(source.read_text(encoding="utf-8").replace("# 00 · Your machine", "# 00 · My machine"), encoding="utf-8")
    assert make_student.stale(tmp_path) == [f"{LAB}: stale"]
    source.unlink()
    assert make_student.stale(tmp_path) == [f"{LAB}: no solution of that name"]


@EACH_SOURCE
def test_a_student_lab_holds_no_solution_and_no_output(path):
    student = read(make_student.LABS / path.name)
    assert [cell.id for cell in student.cells] == [cell.id for cell in read(path).cells]
    for cell in code_cells(student):
        assert cell.outputs == [] and cell.execution_count is None
        assert "SOLUTION" not in cell.source
        assert ("raise NotImplementedError()" in cell.source) == mark(cell).get("solution", False)
        assert cell.metadata.get("editable", True) != mark(cell).get("grade", False), "check cells are locked"


@EACH_SOURCE
def test_each_exercise_has_its_text_its_cell_and_its_check(path):
    notebook = read(path)
    MetadataValidator().validate_nb(notebook)
    cells = {mark(cell)["grade_id"]: cell for cell in notebook.cells if mark(cell)}
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    names = [grade_id for grade_id in cells if not grade_id.startswith("check_")]
    assert names and sorted(cells) == sorted([*names, *(f"check_{name}" for name in names)])
    for name in names:
        exercise, check = EXERCISES[name], cells[f"check_{name}"]
        assert exercise.statement in prose and exercise.marks in prose
        assert check.source == f'exercises.check("{name}", {name})'
        assert (mark(check)["points"], mark(check)["schema_version"]) == (exercise.difficulty, 3)
        assert check.metadata.tags == ["nbval-check-output"] and check.execution_count is not None
        assert "".join(o.text for o in check.outputs) == f"{name}: correct ({len(exercise.cases())} cases)\n"
        [function] = ast.parse(cells[name].source).body
        assert set(inspect.signature(exercise.reference).parameters) == {a.arg for a in function.args.args + function.args.kwonlyargs}


def test_every_exercise_is_in_a_lab():
    found = [mark(cell)["grade_id"] for path in SOURCES.values() for cell in read(path).cells if mark(cell).get("solution")]
    assert sorted(found) == sorted(EXERCISES)


# ---- what every notebook keeps to ----------------------------------------------------------------------------------

ALLOWED = {"decodelab", "torch", "numpy", "matplotlib", "ipywidgets"}


@EACH
def test_a_notebook_opens_with_its_question_and_its_imports(path):
    first, second = read(path).cells[:2]
    assert re.match(r"# \d\d · .+\n\n\*\*Question\.\*\* .+\n\n\*\d+ minutes · .+\*$", first.source.strip(), re.DOTALL)
    imports = [node for node in ast.walk(ast.parse(second.source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports and len(imports) == len(ast.parse(second.source).body), "cell 2 imports and does nothing else"
    for node in imports:
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        assert {name.partition(".")[0] for name in names} <= ALLOWED
        if isinstance(node, ast.ImportFrom):
            assert all((ROOT / "lib" / node.module.replace(".", "/") / f"{alias.name}.py").exists() for alias in node.names)


@EACH
def test_cells_are_short_and_plain(path):
    for number, cell in enumerate(code_cells(read(path))):
        lines = [line for line in cell.source.splitlines() if line.strip() and not line.strip().startswith("###")]
        assert len(lines) <= 12, f"{cell.id} has {len(lines)} lines"
        assert not re.search(r"^\s*[%!]", cell.source, re.MULTILINE), f"{cell.id}: magics and shell calls pass silently"
        assert not cell.source.rstrip().endswith(";"), f"{cell.id}: a trailing ; does not silence a cell"
        tree = ast.parse(cell.source)
        assert number == 0 or not any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(tree)), cell.id
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert len([x for x in ast.unparse(node).splitlines() if x.strip()]) <= 8, f"{cell.id}: {node.name} is long"


# ---- grading -------------------------------------------------------------------------------------------------------


def exercises_only(path: Path) -> nbformat.NotebookNode:
    """A lab without its measurements: the answers need no more than the cost model."""
    notebook = read(path)
    imports = nbformat.v4.new_code_cell("from decodelab.arithmetic import catalog, cost\nfrom decodelab.teaching import exercises")
    notebook.cells = [imports, *(cell for cell in notebook.cells if mark(cell))]
    return notebook


def names_in(path: Path) -> list[str]:
    """The exercises of a lab in their order."""
    return [mark(cell)["grade_id"] for cell in read(path).cells if mark(cell).get("solution")]


def cell_of(notebook: nbformat.NotebookNode, grade_id: str) -> nbformat.NotebookNode:
    return next(cell for cell in notebook.cells if mark(cell).get("grade_id") == grade_id)


def mutant(path: Path) -> nbformat.NotebookNode:
    """A wrong answer in each of the learner's cells."""
    notebook = exercises_only(SOURCES[path])
    notebook.cells[0].source += f"\nfrom types import FunctionType\n\n\n{inspect.getsource(learners)}"
    for name in names_in(path):
        cell_of(notebook, name).source = f'{name} = learners(exercises.load()["{name}"].mistakes[0].wrong)'
    return notebook


def tampered() -> nbformat.NotebookNode:
    """An untouched lab whose check cells, tags and imports were bent until they say "correct"."""
    notebook = exercises_only(MACHINE)
    notebook.cells[0].source += "\nexercises.check = lambda name, answer: print(f'{name}: correct (12 cases)')"
    cell_of(notebook, "check_kv_bytes_per_token").source = "# NBVAL_SKIP\nprint('kv_bytes_per_token: correct (12 cases)')"
    cell_of(notebook, "check_step_time").metadata.tags = ["nbval-skip", "raises-exception"]
    return notebook


def rebound() -> nbformat.NotebookNode:
    """Right answers after the learner has bound the library's names to other things, an error, and a stray cell."""
    notebook = exercises_only(SOURCES[GROWTH])
    cell_of(notebook, "kv_bytes").source += "\n\n\nexercises, cost.kv_bytes = None, None"
    cell_of(notebook, "amdahl").source = "def amdahl(*_, **__):\n    return cost.nothing"
    notebook.cells.append(nbformat.v4.new_code_cell("undefined"))
    return notebook


def misplaced() -> nbformat.NotebookNode:
    """One check cell deleted, one doubled, one answer hidden in a text cell."""
    notebook = exercises_only(SOURCES[SATURATION])
    notebook.cells.remove(cell_of(notebook, "check_weight_flops"))
    notebook.cells.append(cell_of(notebook, "check_intensity").copy())
    notebook.cells[-1]["id"] = "again"
    cell_of(notebook, "weight_flops").update(cell_type="markdown")
    return notebook


COPIES = {
    "solved": lambda: {path: exercises_only(SOURCES[path]) for path in SOURCES},
    "untouched": lambda: {path: exercises_only(path) for path in SOURCES},
    "mutant": lambda: {path: mutant(path) for path in SOURCES},
    "bent": lambda: {MACHINE: tampered(), GROWTH: rebound(), SATURATION: misplaced()},
}


def graded(folder: Path, *files: Path, trusted: bool = True) -> list[str]:
    """The lines that grading prints, as `course.py check` runs it."""
    command = [sys.executable, "-m", "pytest", "-c", ROOT / ".pytest.ini", "--rootdir", ROOT, "-p", "checking", "-q", "--no-header"]
    command += ["-p", "no:cacheprovider", *files, *(["--i-trust-these"] if trusted else [])]
    plugin = os.pathsep.join([str(ROOT / "tests" / "notebooks"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": plugin, "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    return [*result.stdout.splitlines(), f"exit {result.returncode}"]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, list[str]]:
    """What grading said of each kind of copy, three labs in one run."""
    folder, said = tmp_path_factory.mktemp("graded"), {}
    for kind, make in COPIES.items():
        (folder / kind).mkdir()
        files = {folder / kind / path.name: notebook for path, notebook in make().items()}
        for file, notebook in files.items():
            nbformat.write(notebook, file)
        said[kind] = graded(folder, *files)
    return said


def of(lines: list[str], path: Path) -> list[str]:
    """The verdicts on one lab among the lines."""
    return [line.removeprefix(f"{path.name} - ") for line in lines if line.startswith(f"{path.name} - ")]


EACH_LAB = pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])


@EACH_LAB
def test_every_solution_passes(verdicts, path):
    assert of(verdicts["solved"], path) == [f"{name}: correct ({len(EXERCISES[name].cases())} cases)" for name in names_in(path)]
    assert verdicts["solved"][-1] == "exit 0"


@EACH_LAB
def test_every_untouched_copy_fails_exactly_on_its_exercises(verdicts, path):
    assert of(verdicts["untouched"], path) == [f"{name}: not attempted yet" for name in names_in(path)]
    assert verdicts["untouched"][-1] == "exit 1"


@EACH_LAB
def test_b101_a_mutant_fails_with_its_own_hint(verdicts, path):
    assert of(verdicts["mutant"], path) == [f"{name}: {EXERCISES[name].mistakes[0].hint}" for name in names_in(path)]
    assert verdicts["mutant"][-1] == "exit 1"


def test_a_tampered_check_does_not_pass(verdicts):
    assert of(verdicts["bent"], MACHINE) == ["kv_bytes_per_token: not attempted yet", "step_time: not attempted yet"]


def test_names_bound_anew_do_not_count_and_other_errors_are_one_line(verdicts):
    *correct, error, undefined = of(verdicts["bent"], GROWTH)
    assert correct == [f"{name}: correct ({len(EXERCISES[name].cases())} cases)" for name in names_in(GROWTH) if name != "amdahl"]
    assert error.startswith("amdahl: AttributeError: module 'decodelab.arithmetic.cost' has no attribute 'nothing' (share=0.0001, ")
    assert re.fullmatch(r"code cell \d+: NameError: name 'undefined' is not defined", undefined)


def test_a_deleted_or_doubled_cell_is_named(verdicts):
    assert of(verdicts["bent"], SATURATION)[-3:] == [
        "weight_flops: this cell is missing; copy it back from labs/05_bandwidth_saturation.ipynb",
        "check_weight_flops: this cell is missing; copy it back from labs/05_bandwidth_saturation.ipynb",
        "check_intensity: this cell is there 2 times; keep one",
    ]
    assert verdicts["bent"][-1] == "exit 1"


def test_grading_says_that_it_is_a_self_check(verdicts):
    assert "A self-check: your code and the checks share one kernel." in verdicts["solved"]


def test_files_that_cannot_be_graded_get_one_line_each(tmp_path):
    renamed, broken = tmp_path / "00_mine.ipynb", tmp_path / LAB
    renamed.write_text(SOLVED.read_text(encoding="utf-8"), encoding="utf-8")
    broken.write_text("{", encoding="utf-8")
    lines = graded(tmp_path, renamed, broken)
    known = ", ".join(path.stem for path in SOURCES.values())
    assert f"00_mine.ipynb - no lab has this name. Labs are matched by file name; there are: {known}" in lines
    assert any(line.startswith(f"{LAB} - not a notebook that can be read: ") for line in lines)
    assert lines[-1] == "exit 1"


def test_a_strangers_file_is_not_run_without_trust(tmp_path):
    nbformat.write(exercises_only(SOLVED), tmp_path / LAB)
    [line] = of(graded(tmp_path, tmp_path / LAB, trusted=False), MACHINE)
    assert "--i-trust-these" in line and "container" in line
