"""The README's figures are those of the result files."""

import pytest

import tables


@pytest.mark.parametrize("page", list(tables.PAGES))
def test_the_readme_shows_the_figures_of_the_result_files(page):
    assert tables.rewritten(page) == (tables.ROOT / page).read_text(), "run `make tables`"


def test_every_result_says_what_kind_of_number_it_is():
    for path in tables.RESULTS.glob("*.json"):
        result = tables.json.loads(path.read_text())
        assert result["commit"]
        for figure in result["figures"]:
            assert figure["kind"] in ("measured", "simulated", "published", "derived")
            assert figure["kind"] != "measured" or result["samples"].get(figure["name"])
