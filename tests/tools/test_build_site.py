"""Links of the pages, as the documentation site has them."""

import re

import pytest
from build_site import pages, site_path, site_text
from tree import ROOT


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "[a](docs/guide/vllm.md#x)", "[a](guide/vllm.md#x)"),
        ("README.md", "![a](plots/idea.svg)", "![a](plots/idea.svg)"),
        ("docs/guide/vllm.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/guide/vllm.md", "[a](../results/index.md)", "[a](../results/index.md)"),
        ("docs/guide/vllm.md", "![a](../../plots/x/b.png)", "![a](../plots/x/b.png)"),
        ("docs/guide/vllm.md", "[record](../../results/h200)", "record (`results/h200`)"),
        ("docs/guide/vllm.md", "[a](https://arxiv.org/x)", "[a](https://arxiv.org/x)"),
        ("docs/guide/vllm.md", "[a](#below)", "[a](#below)"),
    ],
)
def test_a_link_of_the_site(page, link, expected):
    assert site_text(page, f"See {link}.") == f"See {expected}."


def test_every_page_is_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"- (?:\w+: )?(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(str(site_path(page)) for page in pages())
