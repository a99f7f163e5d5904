"""Texts in CSV and Markdown: none is a formula, none leaves its cell."""

from __future__ import annotations

import csv
import io
import re

import pandas as pd
import pytest

from fsbench.records.sheet import as_csv, escaped, markdown_table

LEADERS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@pytest.mark.parametrize("blank", ["", " ", "\t", "\n", "\r\n", "\u00a0", "\x0b", "\x00", "\ufeff"])
@pytest.mark.parametrize("leader", LEADERS)
def test_no_cell_of_csv_is_a_formula(blank, leader):
    text = f"{blank}{leader}HYPERLINK(1)"
    written = as_csv(pd.DataFrame({"label": [text]}), index=False)
    (_, (cell,)) = csv.reader(io.StringIO(written, newline=""))
    assert cell == f"'{text}"


@pytest.mark.parametrize("text", ["", "a=1", "flash_sample", "'=1", "3", " a"])
def test_other_texts_stay_as_they_are(text):
    written = as_csv(pd.DataFrame({"label": [text], "n": [-1.5]}), index=False)
    (_, cells) = csv.reader(io.StringIO(written))
    assert cells == [text, "-1.5"]


@pytest.mark.parametrize(
    "text", ["a|b", "a\\|b", "a\\", "`a", "a\nb", "<b>", "[x](http://y)", "![x](y)"]
)
def test_a_text_stays_in_its_cell_of_markdown(text):
    table = markdown_table(["sampler", "us"], [[text, "1"]])
    *_, row = table.split("\n")
    assert len(table.split("\n")) == 3
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3
    assert not re.search(r"(?<!\\)([`<]|\[x\])", escaped(text))
