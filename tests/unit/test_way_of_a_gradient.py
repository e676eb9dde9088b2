"""The table of docs/executor.md that follows one gradient names functions that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\|[^|]*\| `([\w/]+\.py)` \| (`.*) \|$")


def rows():
    page = (ROOT / "docs/executor.md").read_text().split("One gradient on its way", 1)[1]
    for line in page.split("\n\n")[1].splitlines()[2:]:
        found = ROW.match(line)
        assert found, f"no file and functions in {line!r}"
        yield found[1], re.findall(r"`(\w+)`(?=, |$|:| )", found[2])


def test_every_function_on_the_way_is_in_its_file():
    places = list(rows())
    assert len(places) > 10
    for name, functions in places:
        text = (ROOT / "executor" / name).read_text()
        assert functions, f"no function of {name}"
        missing = [f for f in functions if not re.search(rf"def {f}\(", text)]
        assert not missing, f"{name} has no {missing}"
