"""Predictions: what is read from a box, what is scored, what is kept. Nothing a learner types stops the lesson."""

import json

import pytest

from decodelab.teaching import predictions
from decodelab.teaching.predictions import NotANumber, ask, history, read_number, result


@pytest.fixture(autouse=True)
def own_log(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    monkeypatch.setattr(predictions, "_asked", {})
    monkeypatch.setattr(predictions, "_shown", set())
    return tmp_path


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("12", "s", 12), (" 1,200 ms ", "s", 1.2), ("3e-3", "s", 0.003), (".5", "x", 0.5), ("12 %", "%", 12), ("12", "%", 12), ("2 GiB", "GB", 2.147483648),
     ("1_000", "tokens", 1000), ("12.", "s", 12), ("5 seconds", "s", 5), ("$5", "$", 5), ("3 ×", "x", 3), ("4.8 TB/s", "GB/s", 4800)],
)  # fmt: skip
def test_numbers_are_read_with_their_unit(text, unit, value):
    assert read_number(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit", "said"),
    [("soon", "s", "'soon' is not a number.*in s"), ("", "s", "not a number"), ("-3", "s", "-3 is below zero"), ("5 GB", "s", "'GB' is another kind"),
     ("5 parsecs", "s", "another kind"), ("nan", "s", "not a number"), ("1 2", "s", "not a number"), ("1,5", "s", "not a number"), ("1e400", "s", "not a number"), ("<b>1</b>", "s", "not a number")],
)  # fmt: skip
def test_what_is_no_number_gets_a_friendly_line(text, unit, said):
    with pytest.raises(NotANumber, match=said):
        read_number(text, unit)


def typed(widget, text):
    """What the box answers, as the learner sees it."""
    _, row = widget.children
    row.children[0].value = text
    return row.children[2].value


def test_a_prediction_is_taken_scored_and_logged(own_log):
    box = ask("t.one", "How long?", unit="s")
    assert "You predict 12.00 s" in typed(box, "12")
    shown = result("t.one", measured=10.0, floor=4.0, formula=9.5)
    assert [row[1:] for row in shown.rows()] == [("12.00 s", "+20.0 %"), ("4.000 s", "-60.0 %"), ("9.500 s", "-5.0 %"), ("10.00 s", "")]
    (logged,) = history()
    assert (logged.key, logged.entered, logged.measured, logged.error_fraction) == ("t.one", 12.0, 10.0, pytest.approx(0.2))


@pytest.mark.parametrize("text", ["later", "-1", "7 GB", "<script>"])
def test_a_bad_entry_leaves_no_prediction_and_the_lesson_goes_on(text):
    answer = typed(ask("t.bad", "How long?", unit="s"), text)
    assert answer and "<script>" not in answer
    assert result("t.bad", measured=1.0).rows()[0] == ("your prediction", "none", "")


def test_a_prediction_after_the_result_is_not_scored():
    box = ask("t.late", "How long?", unit="s")
    result("t.late", measured=10.0)
    assert "not scored" in typed(box, "10")
    result("t.late", measured=10.0)
    assert [outcome.entered for outcome in history()] == [None, None]
    again = ask("t.late", "How long?", unit="s")  # asking again does not hide what was seen
    assert "not scored" in typed(again, "9")


def test_a_result_nobody_was_asked_for_and_a_zero_do_not_raise():
    assert result("t.never", measured=0.0, unit="s").rows()[0][1] == "none"
    typed(ask("t.zero", "How many?", unit="x"), "3")
    assert result("t.zero", measured=0.0).outcome.error_fraction is None


def test_question_and_unit_are_escaped():
    label = ask("t.html", "<img src=x>", unit="s").children[0]
    assert "<img" not in label.value and "&lt;img" in label.value


def test_a_broken_log_costs_lines_not_the_lesson(own_log, monkeypatch):
    log = own_log / "predictions.jsonl"
    result("t.kept", measured=1.0, unit="s")
    log.write_text("junk\n[1]\n" + json.dumps({"key": "half"}) + "\n" + log.read_text(encoding="utf-8"), encoding="utf-8")
    assert [outcome.key for outcome in history()] == ["t.kept"]
    monkeypatch.setenv("DECODELAB_HOME", str(log))  # a file where the folder should be
    assert result("t.lost", measured=1.0, unit="s").outcome.key == "t.lost"
