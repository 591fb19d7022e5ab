"""JupyterLab, started as `course.py lab` starts it, and a browser to look at it: skipped in one line where none is."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import course

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "microsoft-edge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
    "C:/Program Files (x86)/Microsoft/Edge/Application/msedge.exe",
)
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
 --disable-component-update --disable-sync""".split()
SLIDER = """import ipywidgets
slider = ipywidgets.IntSlider(value=4, min=1, max=9, description="batch")
number = ipywidgets.HTML("4 sequences")
slider.observe(lambda change: setattr(number, "value", f"{change['new']} sequences"), names="value")
_ = slider
ipywidgets.VBox([slider, number])"""


def installed_browser() -> str | None:
    """The path of a Chromium, Chrome or Edge on this machine."""
    found = [shutil.which(name) for name in NAMES] + [place for place in PLACES if Path(place).exists()]
    return next((path for path in found if path), None)


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args):
    path = installed_browser()
    if not path and os.environ.get("BROWSER_TESTS") == "required":
        pytest.fail("BROWSER_TESTS=required, and there is no Chromium, Chrome or Edge on this machine")
    if not path:
        pytest.skip("no Chromium, Chrome or Edge on this machine")
    return {**browser_type_launch_args, "executable_path": path, "args": FLAGS, "headless": True}


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory):
    """The address of a running JupyterLab with its token; its root holds fresh working copies and a slider notebook."""
    root, home = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("home")
    course.working_copies(root / "my")
    (root / "my" / "slider.ipynb").write_text(notebook(SLIDER), encoding="utf-8")
    port, token = free_port(), secrets.token_hex(16)
    private = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    setting = {name: str(home / name.lower()) for name in private}
    here = ["--no-browser", f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"]
    here += [f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"]
    log = home / "jupyter.log"
    with log.open("w") as stream:
        command = [sys.executable, *course.lab_arguments(root), *here]
        server = subprocess.Popen(command, env={**os.environ, **setting}, stdout=stream, stderr=stream)
    try:
        wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, log)
        yield f"http://127.0.0.1:{port}", token
    finally:
        server.terminate()
        server.wait(timeout=30)


def notebook(source: str) -> str:
    """A notebook of one code cell."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = {"cell_type": "code", "id": "slider", "source": source, "metadata": {}}
    code |= {"outputs": [], "execution_count": None}
    content = {"cells": [code], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    """Return once the server answers; fail with its log where it ends or does not within a minute."""
    for _ in range(240):
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                break
            time.sleep(0.25)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
