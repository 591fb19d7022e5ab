"""Make the labs that learners get from labs/solutions: no solutions, no outputs, check cells locked.

python labs/make_student.py            write labs/*.ipynb
python labs/make_student.py --check    write nothing; name the labs that are stale, exit status 1 if there are any
"""

import argparse
import sys
from pathlib import Path

import nbformat
from nbconvert.exporters import NotebookExporter
from nbconvert.preprocessors import ClearOutputPreprocessor
from nbgrader.preprocessors import ClearHiddenTests, ClearSolutions, LockCells

LABS = Path(__file__).resolve().parent


def student_copy(source: Path) -> str:
    """The student's text of one solution notebook: the same cells and ids, each solution replaced by a stub."""
    steps = [LockCells, ClearSolutions, ClearHiddenTests, ClearOutputPreprocessor]
    text, _ = NotebookExporter(preprocessors=steps).from_filename(str(source))
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata.language_info = {
        "name": "python"
    }  # not the Python that happened to run the solution
    return nbformat.writes(notebook, indent=1) + "\n"


def sources(labs: Path = LABS) -> dict[Path, Path]:
    """Student lab -> its source, for every labs/solutions/NAME/NAME.ipynb."""
    found = sorted(
        path for path in labs.glob("solutions/*/*.ipynb") if path.stem == path.parent.name
    )
    return {labs / path.name: path for path in found}


def stale(labs: Path = LABS) -> list[str]:
    """One line per student lab that is missing, differs from its source, or has no source."""
    wanted = sources(labs)
    faults = [
        f"{lab.name}: {_fault(lab, source)}"
        for lab, source in wanted.items()
        if _fault(lab, source)
    ]
    return faults + [
        f"{lab.name}: no solution of that name" for lab in labs.glob("*.ipynb") if lab not in wanted
    ]


def _fault(lab: Path, source: Path) -> str:
    if not lab.exists():
        return "missing"
    return "" if lab.read_text(encoding="utf-8") == student_copy(source) else "stale"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    if parser.parse_args(arguments).check:
        for fault in stale():
            print(f"labs/{fault}; run: python labs/make_student.py")
        return 1 if stale() else 0
    for lab, source in sources().items():
        lab.write_text(student_copy(source), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
