"""The sliders of the lessons, as a learner without a mouse uses them: keys move them, numbers and pictures follow."""

import statistics

import pytest
from test_course import CELLS, open_notebook, run_all

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
WATCH = """picture => {
    window.took = [];
    document.addEventListener('keydown', () => { window.pressed = performance.now(); }, true);
    new MutationObserver(() => window.took.push(performance.now() - window.pressed)).observe(picture, {attributes: true, attributeFilter: ['src']});
}"""


@pytest.mark.parametrize("lesson", ["01_prefill_and_decode", "02_kv_cache", "04_long_context_is_not_decode_heavy"])
def test_slider_answers_with_a_number_and_a_picture(page, jupyter, lesson):
    """Each arrow key gives a new picture and other numbers; the median from key to picture is printed, not asserted."""
    open_notebook(page, *jupyter, f"/lab/workspaces/{lesson}/tree/my/lessons/{lesson}.ipynb")
    run_all(page)
    sources = ["".join(cell["source"]) for cell in page.evaluate(CELLS)]
    place = next(number for number, source in enumerate(sources) if "explorer(" in source)
    page.evaluate(f"() => window.jupyterapp.shell.currentWidget.content.scrollToItem({place}, 'center')")
    explorer = page.locator(".jp-OutputArea-output .widget-vbox", has=page.locator("img.widget-image")).first
    explorer.scroll_into_view_if_needed()
    picture, numbers = explorer.locator("img.widget-image"), explorer.locator(".widget-html-content b").last
    picture.evaluate(WATCH)
    handle = explorer.locator(".noUi-handle").last
    handle.focus()
    handle.press("Home")
    page.wait_for_timeout(1_000)
    seen, skip = {numbers.inner_text()}, len(page.evaluate("window.took"))
    for key in ["ArrowRight", "ArrowLeft"] * 8:
        before = len(page.evaluate("window.took"))
        handle.press(key)
        page.wait_for_function(f"window.took.length > {before}", timeout=10_000)
        seen.add(numbers.inner_text())
    took = page.evaluate("window.took")[skip:]
    print(f"\n{lesson}: {statistics.median(took):.0f} ms from key to picture, median of {len(took)}, {max(took):.0f} ms at most")
    assert len(seen) >= 2 and len(took) == 16
