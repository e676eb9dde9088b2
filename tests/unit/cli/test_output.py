"""How texts are broken into lines."""

from meshwright.cli.output import in_lines


def test_no_line_ends_between_a_number_and_its_unit():
    for unit in ("KiB", "GiB", "B", "s", "ms", "µs", "Gbit/s", "Mbit/s"):
        text = f"it needs 1.45 {unit}: take less"
        lines = in_lines(text, 14).split("\n")
        assert f"1.45 {unit}:" in " / ".join(lines)
        assert " ".join(lines) == text
        assert max(map(len, lines)) <= 16


def test_what_is_no_unit_and_lines_that_there_are_stay():
    assert in_lines("of 8 samples", 5).split("\n") == ["of 8", "samples"]
    assert in_lines("first\n  --a-long-option", 20) == "first\n  --a-long-option"
