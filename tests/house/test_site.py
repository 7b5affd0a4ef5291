"""The site in a real Chromium, wide and narrow: no picture is cut, no option name is broken, and examples are code."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
PATIENCE_SECONDS = 300
LOOK = """<!doctype html><body><script>
const pages = PAGES, width = WIDTH, found = [];
const frame = document.createElement("iframe");
frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
document.body.append(frame);
function look(page) {
  const inside = frame.contentDocument, view = inside.documentElement;
  const say = (what, one) => found.push(`${page}: ${what}: ${one}`);
  if (view.scrollWidth > width + 1) say("wider than the window", view.scrollWidth);
  for (const one of inside.querySelectorAll(".md-content img")) {
    const box = one.getBoundingClientRect();
    if (!one.naturalWidth) say("not loaded", one.src);
    if (box.right > width + 1 || box.left < 0 || box.width < 200) say("cut", one.src);
  }
  for (const one of inside.querySelectorAll("td:first-child code"))
    if (one.getClientRects().length > 1) say("broken", one.textContent);
  for (const one of inside.querySelectorAll("details.example, blockquote blockquote"))
    say("no code", one.textContent.slice(0, 60));
}
function next() {
  const page = pages.shift();
  if (page === undefined) { fetch("/found", {method: "POST", body: JSON.stringify(found)}); return; }
  frame.onload = () => { look(page); next(); };
  frame.src = page;
}
next();
</script>"""


class Answers(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and puts what a page posts into `posted`."""

    posted: queue.Queue[bytes]

    def do_POST(self) -> None:
        self.posted.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, queue.Queue[bytes]]]:
    handler = type("Handler", (Answers,), {"posted": queue.Queue()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.posted
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_SECONDS)
    return folder


def problems(site: Path, pages: list[str], width: int) -> list[str]:
    """What a reader of these pages does not see as it should be, in a window of that width."""
    script = LOOK.replace("PAGES", json.dumps([f"/{one}" for one in pages])).replace("WIDTH", str(width))
    (site / "look.html").write_text(script)
    with serving(site) as (url, posted):
        command = [str(BROWSER), "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        browser = subprocess.Popen(
            [*command, f"--window-size={width + 100},1000", f"{url}/look.html"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the program is a shell script, and the browser its child
        )
        try:
            return [str(one) for one in json.loads(posted.get(timeout=PATIENCE_SECONDS))]
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_of_the_pages_is_cut(site: Path, width: int) -> None:
    """Every page but the decision records, which have no pictures."""
    pages = [str(one.relative_to(site)) for one in sorted(site.glob("**/index.html")) if "decisions" not in one.parts]
    assert len(pages) > 40
    assert problems(site, pages, width) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_look_finds_what_is_cut(site: Path) -> None:
    """A picture that is wider than the window, and an example that is a quotation."""
    page = '<body><div class="md-content"><img src="/figures/demo.svg" style="width: 900px"></div>'
    (site / "bad.html").write_text(f"{page}<blockquote><blockquote>x</blockquote></blockquote></body>")
    assert [one.split(": ")[1] for one in problems(site, ["bad.html"], 400)] == [
        "wider than the window",
        "cut",
        "no code",
    ]
