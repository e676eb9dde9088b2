"""Where ``launch``'s own options end and those of the script begin."""

import pytest
from meshwright.commands.running import separate_script


@pytest.mark.parametrize(
    ("given", "script"),
    [
        ("launch p.json", None),
        ("launch p.json --nproc 2", None),
        ("launch --nproc 2 p.json --json", None),
        ("launch p.json s.py --lr 1 --json", "s.py --lr 1 --json"),
        ("launch p.json --nproc 2 s.py --nproc 3", "s.py --nproc 3"),
        ("launch p.json --json s.py p.json", "s.py p.json"),
        ("launch --timeout=9 p.json -m mine.train -v", "-m mine.train -v"),
        ("launch p.json -- s.py -x", "s.py -x"),
        ("plan launch p.json s.py", None),
    ],
)
def test_the_script_begins_after_the_plan(given, script):
    found = separate_script(given.split())
    assert [w for w in found if w != "--"] == [w for w in given.split() if w != "--"]
    if script is None:
        assert "--" not in found
    else:
        assert found[found.index("--") + 1 :] == script.split()
