"""Puts data/*.csv, data/runs/, the reasoner and two lists of the labs into the wheel, below decodelab/."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CourseFiles(BuildHookInterface):
    """Leaves an editable install alone: there the library reads the repository's own files."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Add each file under the path that decodelab.arithmetic.catalog.course_file() looks at first."""
        if version == "editable":
            return
        course = Path(self.root).parent
        lists = [course / "labs" / name for name in ("exercises.py", "techniques.py")]
        for file in [*course.glob("data/*.csv"), *course.glob("data/runs/**/*"), *course.glob("data/models/reasoner*/*"), *lists]:
            if file.is_file():
                build_data["force_include"][str(file)] = f"decodelab/{file.relative_to(course).as_posix()}"
