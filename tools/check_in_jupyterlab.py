"""Open a lesson in JupyterLab with headless Chromium, run every cell, report what a reader sees.

    .venv/bin/pip install playwright    # the Python package; the browser is your system's Chromium
    .venv/bin/python tools/check_in_jupyterlab.py 00_start_here.ipynb --png docs/images/lab-00.png

Starts ``k3lab lab --no-browser`` the way ``make lab`` does on a machine without a display, reads
the URL that it prints, and opens the lesson there. Exits with status 1 if a cell failed, if no plot
was drawn although the notebook has one, or if the page logged an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Reads the notebook model of the open tab: how many code cells have run, and which have failed.
STATE = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  const cells = [...panel.content.widgets].filter(c => c.model.type === 'code');
  const outputs = cells.map(c => c.model.outputs.toJSON()).flat();
  return {
    cells: cells.filter(c => c.model.sharedModel.getSource().trim()).length,
    done: cells.filter(c => c.model.executionCount).length,
    busy: panel.sessionContext.session?.kernel?.status,
    errors: outputs.filter(o => o.output_type === 'error').map(o => `${o.ename}: ${o.evalue}`),
  };
}"""


def start_lab(home: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start JupyterLab and return its process and the URL with the token."""
    (home / "jupyter_lab_config.py").write_text("c.LabApp.expose_app_in_browser = True\n")
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    env |= {"K3LAB_HOME": str(home), "JUPYTER_CONFIG_DIR": str(home)}
    log = home / "lab.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "k3lab"), "lab", "--no-browser"],
            cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        match = re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", log.read_text())
        if match and _answers(match.group(0)):
            return process, match.group(0)
        time.sleep(0.5)
    process.kill()
    raise SystemExit(f"JupyterLab did not come up:\n{log.read_text()[-2000:]}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, follow_redirects=True, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def declared_plots(notebook: Path) -> int:
    """How many plotly figures the committed notebook holds."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [o for c in cells for o in c.get("outputs", [])]
    return sum("application/vnd.plotly.v1+json" in o.get("data", {}) for o in outputs)


def main() -> int:
    """Run the check from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", help="file name in notebooks/")
    parser.add_argument("--png", type=Path, help="where to save the screenshot")
    parser.add_argument(
        "--scroll-to", default=".js-plotly-plot", help="selector to bring into view"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all cells")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()

    from playwright.sync_api import sync_playwright

    notebook = ROOT / "notebooks" / options.notebook
    committed = notebook.read_bytes()
    with tempfile.TemporaryDirectory() as home:
        lab, url = start_lab(Path(home))
        try:
            with sync_playwright() as play:
                browser = play.chromium.launch(
                    executable_path=options.chromium, args=CHROMIUM_FLAGS
                )
                page = browser.new_page(viewport={"width": 1360, "height": 1000})
                console: list[str] = []
                page.on("console", lambda m: m.type == "error" and console.append(m.text[:200]))
                parts = urlsplit(url)
                page.goto(
                    f"{parts.scheme}://{parts.netloc}/lab/tree/notebooks/{options.notebook}?{parts.query}"
                )
                page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
                page.wait_for_timeout(3_000)
                page.click('.lm-MenuBar-itemLabel:text-is("Run")')
                page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
                deadline = time.monotonic() + options.timeout
                page.wait_for_timeout(2_000)
                state = page.evaluate(STATE)
                while time.monotonic() < deadline and not state["errors"]:
                    state = page.evaluate(STATE)
                    if state["done"] >= state["cells"] and state["busy"] == "idle":
                        break
                    page.wait_for_timeout(1_000)
                page.wait_for_timeout(1_500)
                plot = page.locator(options.scroll_to).first
                if plot.count():
                    for _ in range(3):  # cells above are laid out as they come into view
                        plot.evaluate("e => e.scrollIntoView({block: 'end'})")
                        page.wait_for_timeout(1_000)
                drawn = page.locator(".js-plotly-plot").count()
                if options.png:
                    page.screenshot(path=str(options.png))
                browser.close()
        finally:
            os.killpg(lab.pid, signal.SIGTERM)
            lab.wait(timeout=30)
            notebook.write_bytes(committed)  # JupyterLab saves by itself every two minutes
    print(json.dumps({**state, "plots_drawn": drawn, "console_errors": console}, indent=2))
    complete = state["done"] >= state["cells"]
    want = declared_plots(notebook) > 0
    return 0 if complete and not state["errors"] and not console and (drawn or not want) else 1


if __name__ == "__main__":
    sys.exit(main())
