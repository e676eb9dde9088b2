"""A headless Chromium: pages as it shows them, and what it complains of."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 120
# A window is never narrower than 500 pixels, so the page is in a frame of the width that is asked
# for, which is all that it knows.
FRAME = """<!DOCTYPE html><body style="margin:0">
<iframe src="{page}" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>addEventListener("message", (e) => (document.documentElement.dataset.found = e.data))
</script>"""
# Runs when the page is there, in a copy of it: what every chart that is shown has, and what of it
# lies outside or on top of each other.
LOOK = """
<script>
addEventListener("load", () => {
  const inside = (a, b) =>
    a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1;
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  const charts = [];
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const place = (e) => [e.textContent, e.getBoundingClientRect()];
    const texts = [...svg.querySelectorAll("text")].map(place);
    const shapes = [...svg.querySelectorAll("rect,polygon,polyline,circle")].filter((e) => {
      const box = e.getBoundingClientRect();
      return box.width > 0 && box.height > 0;
    });
    charts.push({
      name: svg.querySelector("title").textContent,
      width: frame.width,
      shapes: shapes.length,
      letters: Math.min(...texts.map(([, box]) => box.height)),
      outside: texts.filter(([, box]) => !inside(box, frame)).map(([words]) => words),
      covered: texts.flatMap(([words, box], i) =>
        texts.slice(i + 1).filter(([, other]) => meet(box, other)).map(([more]) => [words, more])),
    });
  }
  // Each word of a heading has a box of its own line at most.
  const broken = [...document.querySelectorAll("th")].filter((e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    return range.getClientRects().length > e.textContent.split(" ").length;
  });
  const root = document.documentElement;
  const wide = [...document.querySelectorAll("body *")].filter(
    (e) => !e.closest("svg") && e.getBoundingClientRect().right > root.clientWidth + 1);
  parent.postMessage(JSON.stringify({
    width: innerWidth,
    scrolls: root.scrollWidth,
    charts,
    broken: broken.map((e) => e.textContent),
    wide: wide.map((e) => e.outerHTML.slice(0, 90)),
  }), "*");
});
</script>
"""


def browser() -> str:
    """Its program; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed (Debian's package chromium)")
    return found


def _run(page: Path, width: int, height: int, *options: str) -> tuple[str, str]:
    """(what it prints, what the page's console got); fails where that is anything."""
    done = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={page.parent / 'chromium'}", f"--window-size={width},{height}",
            "--hide-scrollbars", "--enable-logging=stderr", "--v=0", "--no-first-run",
            "--disable-background-networking", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, said


def _framed(page: Path, width: int, height: int) -> Path:
    frame = page.with_name(f"frame-{width}.html")
    frame.write_text(FRAME.format(page=page.name, width=width, height=height), encoding="utf-8")
    return frame


def look(page: Path, width: int, *options: str) -> dict[str, Any]:
    """What the page has at that width, by ``LOOK``; ``console`` is what it said there."""
    copy = page.with_name(f"look-{width}.html")
    copy.write_text(page.read_text(encoding="utf-8") + LOOK, encoding="utf-8")
    # Until the message from the frame has come.
    wait = "--virtual-time-budget=10000"
    dom, said = _run(_framed(copy, width, 1200), width, 1200, "--dump-dom", wait, *options)
    start = dom.index('data-found="') + len('data-found="')
    found: dict[str, Any] = json.loads(unescape(dom[start : dom.index('"', start)]))
    return found | {"console": said}


def screenshot(page: Path, width: int, height: int, out: Path, *options: str) -> Counter[str]:
    """Writes a picture of the page; how many of its pixels have each colour."""
    frame = _framed(page, width, height)
    _, said = _run(frame, width, height, f"--screenshot={out}", *options)
    assert not said
    return colours(out)


def colours(path: Path) -> Counter[str]:
    """How many pixels of a picture have each colour, as ``#rrggbb``."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    values, counts = np.unique(pixels.astype(np.int64) @ (65536, 256, 1), return_counts=True)
    return Counter({f"#{v:06x}": int(n) for v, n in zip(values, counts, strict=True)})
