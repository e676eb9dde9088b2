"""What people are told beside a result: a line each on stderr."""

import sys


def note(text: str | None) -> None:
    """Says ``text`` on stderr, so that stdout stays the result's; nothing where it is empty."""
    if text:
        print(f"note: {text}", file=sys.stderr, flush=True)
