"""What README shows of a terminal is what the commands print."""

import re
import shlex
from pathlib import Path

README = Path(__file__).parents[3] / "README.md"


def sessions() -> list[list[str]]:
    """The lines of each block that begins with a command."""
    blocks = re.findall(r"^```\n(\$ .*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in blocks]


def words(text: str) -> list[str]:
    """The words, but for how long the search took."""
    text = re.sub(r"[\d.]+ m?s of search", "SECONDS of search", text)
    # Where lines are broken depends on how many digits the search's seconds have.
    return text.split()


def test_the_plan_that_readme_shows(meshwright, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert sessions()
    for lines in sessions():
        commands = [line for line in lines if line.startswith("$ ")]
        shown = lines[lines.index(commands[-1]) + 1 :]
        for command in commands:
            name, *arguments = shlex.split(command.removeprefix("$ "))
            assert name == "meshwright"
            done = meshwright(*arguments)
            assert done.code == 0, done.err
        assert words(done.out) == words("\n".join(shown))
