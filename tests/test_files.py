"""Files written whole, and JSON that every reader takes."""

import json

import pytest

from files import write_json, write_text


def test_json_is_strict_and_keeps_numbers_in_a_row_on_one_line(tmp_path):
    values = {"row": [1, 2.5, None, -3e-7], "bad": [float("nan"), float("inf")], "words": ["a", "1, 2"], "empty": []}
    write_json(tmp_path / "x.json", values)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == values | {"bad": [None, None]}
    assert '"row": [ 1, 2.5, null, -3e-07],' in text


def test_a_file_is_whole_or_not_there(tmp_path):
    (tmp_path / "x").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "x", "\ud800")
    assert (tmp_path / "x").read_text() == "before"
