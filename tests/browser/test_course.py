"""A learner's first minutes, in a real browser."""

import tempfile
from pathlib import Path

import pytest

import course

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
IDLE = """() => {
    const panel = window.jupyterapp?.shell?.currentWidget;
    return panel?.content?.model?.cells?.length > 0 && panel.sessionContext?.session?.kernel?.status === 'idle';
}"""
CELLS = "() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"
RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
SCROLL = """top => {
    const panel = document.querySelector('.jp-Notebook .jp-WindowedPanel-outer');
    panel.scrollTo(0, top);
    return panel.scrollHeight;
}"""
START = course.ROOT / "lessons" / "00_start_here.ipynb"


def open_notebook(page, address: str, token: str, path: str) -> None:
    """Open JupyterLab at a path and wait until the notebook's kernel is idle."""
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}{path}?token={token}")
    page.wait_for_function(IDLE, timeout=90_000)


def run_all(page) -> list[dict]:
    """Run every cell, wait for the last one, and return the code cells of the notebook."""
    page.evaluate(RUN_ALL)
    page.wait_for_function(IDLE, timeout=300_000)
    return [cell for cell in page.evaluate(CELLS) if cell["cell_type"] == "code"]


def screenshots(page) -> int:
    """Keep what a reader sees, screen by screen, at two widths; the folder is printed. Returns the pictures seen."""
    pictures = 0
    folder = Path(tempfile.mkdtemp(prefix="decodelab-screenshots-"))
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 1_500})
        number, height = 0, 1
        while number * 1_300 < height:
            page.evaluate(SCROLL, number * 1_300)
            page.wait_for_timeout(700)
            height = page.evaluate(SCROLL, number * 1_300)
            page.screenshot(path=folder / f"lesson_{width}_{number}.png")
            pictures += page.locator(".jp-Notebook .jp-OutputArea-output img:visible").count()
            number += 1
    print(f"screenshots: {folder}")
    return pictures


@pytest.mark.skipif(not START.exists(), reason="lessons/00_start_here.ipynb is not written yet")
def test_first_lesson_opens_empty_and_runs(page, jupyter):
    """What `course.py lab` opens shows no result at first, then runs to its end and shows its figures."""
    open_notebook(page, *jupyter, "/")
    assert page.url.partition("?")[0].endswith("/lab/tree/my/lessons/00_start_here.ipynb")
    assert page.locator(".jp-Notebook .jp-OutputArea-output").count() == 0
    assert not any(cell.get("outputs") for cell in page.evaluate(CELLS))
    cells = run_all(page)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
    assert all(cell["execution_count"] for cell in cells if "".join(cell["source"]).strip())
    assert screenshots(page) > 0
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_slider_moves_by_keyboard(page, jupyter):
    """B102: a slider that cannot be reached by keys. Three steps to the right turn 4 into 7."""
    open_notebook(page, *jupyter, "/lab/workspaces/slider/tree/my/slider.ipynb")
    run_all(page)
    handle = page.locator(".jp-OutputArea-output .noUi-handle")
    handle.focus()
    for _ in range(3):
        handle.press("ArrowRight")
    number = page.locator(".jp-OutputArea-output .widget-html-content", has_text="sequences")
    number.filter(has_text="7 sequences").wait_for(timeout=10_000)


def test_comms_run_in_the_main_thread(page, jupyter):
    """The course's settings reach the browser: no subshells for sliders, no news, no update checks."""
    open_notebook(page, *jupyter, "/lab/workspaces/settings/tree/my/slider.ipynb")
    overrides = page.evaluate("() => window.jupyterapp.serviceManager.settings.list().then(all => all.values)")
    found = {item["id"]: item for item in overrides}
    kernels = found["@jupyterlab/apputils-extension:kernels-settings"]
    notices = found["@jupyterlab/apputils-extension:notification"]
    assert kernels["schema"]["properties"]["commsOverSubshells"]["default"] == "disabled"
    assert notices["schema"]["properties"]["fetchNews"]["default"] == "false"
    assert notices["schema"]["properties"]["checkForUpdates"]["default"] is False
