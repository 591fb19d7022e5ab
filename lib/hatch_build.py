"""Puts data/*.csv and data/runs/ of the repository into the wheel as decodelab/data."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataHook(BuildHookInterface):
    """Leaves an editable install alone: there the library reads the repository's own data."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Add each file under the path that decodelab.arithmetic.catalog.data_dir() looks at first."""
        if version == "editable":
            return
        data = Path(self.root).parent / "data"
        for file in [*data.glob("*.csv"), *data.glob("runs/**/*")]:
            if file.is_file():
                build_data["force_include"][str(file)] = f"decodelab/data/{file.relative_to(data).as_posix()}"
