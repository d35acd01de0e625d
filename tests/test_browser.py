"""ADK's web UI, a report and the documentation in a browser (`pytest -m browser`).

Needs the extras `browser` and `docs`, and Chromium, which playwright does not bring
along. With CONTEXTGUARD_SCREENSHOTS=DIR pictures are saved there.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("playwright", reason="the extra `browser` is not installed")
pytest.importorskip("axe_playwright_python", reason="as above")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._tools.cli import main
from tests.recordings import CALLS, PRICES, WINDOW, record, save

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "samples"
SCREENSHOTS = os.environ.get("CONTEXTGUARD_SCREENSHOTS")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# Icons are letters of a font from the network; without it their names would show.
OFFLINE_STYLE = """
mat-icon, .material-symbols-outlined { visibility: hidden !important; }
* { font-family: sans-serif !important; }
pre { font-family: monospace !important; }
"""

COMPACTION = "context_guard:compacted:operator"
LABEL = re.compile(rf"State: {COMPACTION}, .*__context_guard_summary_operator")
"""How the UI labels the event of a compaction: what people read comes first."""

IS_DRAWN = """
canvas => canvas.getContext("2d")
  .getImageData(0, 0, canvas.width, canvas.height).data.some(byte => byte)
"""
EVIL = (
    "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
)
ARTIFACT = "compaction-operator.md"
ANSWER = "production-api-9676, production-api-8191. All others are running."

Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts `adk web` with a database of its own; returns its address."""
    log_path = tmp_path / "server.log"
    started: list[subprocess.Popen[bytes]] = []

    def start(agents: Path, *options: str, **variables: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        script = str(Path(sysconfig.get_path("scripts")) / "adk")
        sessions = f"--session_service_uri=sqlite:///{tmp_path / 'sessions.db'}"
        command = [script, "web", f"--port={port}", "--no-reload", sessions]
        command += ["--artifact_service_uri=memory://", *options, str(agents)]

        # ADK keeps the answer to its question about telemetry in the home directory.
        environment = {**os.environ, "HOME": str(tmp_path), **variables}

        with log_path.open("wb") as log:
            started.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=log, stderr=log
                )
            )

        address = f"http://127.0.0.1:{port}"
        for _ in range(900):
            try:
                urllib.request.urlopen(f"{address}/list-apps").close()
                return address
            except OSError:
                time.sleep(0.1)
        pytest.fail(f"`adk web` did not start:\n{log_path.read_text()[-2000:]}")

    yield start
    for server in started:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page about a guarded session in which somebody wrote markup."""
    folder = tmp_path_factory.mktemp("report")
    guard = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    session, _ = asyncio.run(record([guard], has_cache=True))

    for event in session.events:
        if event.usage_metadata:
            event.model_version = "simulated"
        summaries = event.actions.state_delta
        text = summaries.get("__context_guard_summary_agent")
        if text:
            summaries["__context_guard_summary_agent"] = f"{EVIL}\n{text}"

    source = save(session, folder)
    page = folder / "a.html"
    config = folder / "a.toml"
    config.write_text(PRICES)
    assert main(["report", str(source), "--config", str(config), "-o", str(page)]) == 0
    return page.as_uri()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files of a folder, without a line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Builds and serves the documentation; gives the addresses of all its pages."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("documentation")
    # The page of a missing address names its files from the root of the real site.
    site = folder / "contextguard-adk"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", f"--site-dir={site}"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)

    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        files = sorted(file.relative_to(folder) for file in site.rglob("*.html"))
        yield [f"{root}/{file.as_posix()}" for file in files]
        server.shutdown()


@pytest.fixture(scope="module")
def browser(report: str) -> Iterator[Browser]:
    """Headless Chromium; it has an event loop, so the report is written before."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page; the test fails where it wrote an error to the console."""
    expect.set_options(timeout=30_000)
    page = browser.new_page(viewport={"width": 1280, "height": 720}, locale="en-US")
    page.set_default_timeout(30_000)
    page.route(lambda url: urlsplit(url).hostname != "127.0.0.1", lambda r: r.abort())
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # Fonts come from the network; ADK's page asks for a style sheet it lacks.
        url = urlsplit(message.location["url"])
        if message.type == "error" and not url.path.endswith((".woff2", ".css")):
            errors.append(f"{message.text} {message.location['url']}")

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def talk_until_compacted(page: Page, address: str, app: str) -> None:
    """Opens an app, sends messages until an event tells of a compaction."""
    page.goto(f"{address}/dev-ui/?app={app}&userId=user")
    page.get_by_role("button", name="No Thanks").click()
    box = page.get_by_role("textbox", name="Type a message...")

    is_compacted = False
    for number in range(1, 8):
        box.fill(f"How are the pods? ({number})")
        with page.expect_response("**/run_sse") as answer:
            box.press("Enter")
        events = answer.value.text()
        # ADK's page has shown an answer twice when it was busy.
        answers = page.get_by_text(ANSWER)
        expect(answers.nth(number - 1)).to_be_attached()
        if is_compacted:
            break  # The page shows it a moment later.
        is_compacted = re.search(rf'"{COMPACTION}": ?"\d', events) is not None

    expect(page.get_by_role("button", name=LABEL)).to_be_visible()
    expect(page.get_by_role("button", name=f"Artifact: {ARTIFACT}")).to_be_visible()


def look_around(page: Page, address: str, app: str, is_saved: bool = False) -> None:
    """Opens state, artifact, the compaction's event and its traces; no errors."""

    def save(name: str) -> None:
        if SCREENSHOTS and is_saved:
            page.mouse.move(0, 0)
            expect(page.locator(".mat-mdc-tooltip")).to_have_count(0)
            path = Path(SCREENSHOTS) / f"web-{name}.png"
            page.screenshot(path=path, style=OFFLINE_STYLE)

    line = re.compile(
        r"[\d,]+ → [\d,]+ tokens, 19 → \d messages, 1 summary by simulated"
    )
    page.get_by_role("tab", name="State").click()
    state = page.get_by_role("tabpanel", name="State")
    expect(state.get_by_text(line)).to_be_visible()
    expect(state.get_by_text(COMPACTION)).to_be_visible()
    for key in ("summary", "summarized_at", "real_tokens", "last_heuristic"):
        expect(state).to_contain_text(f"__context_guard_{key}_operator")
    text = state.inner_text()
    assert text.index("context_guard:usage:") < text.index("__context_guard_")
    first_of_summary = text.index("__context_guard_summar")
    assert text.index("context_guard:compacted:") < first_of_summary
    save("state")
    if SCREENSHOTS and is_saved:
        size = page.viewport_size
        page.set_viewport_size({"width": 390, "height": 844})
        save("state-phone")
        page.set_viewport_size(size or {"width": 1280, "height": 720})
    page.get_by_role("tab", name="Artifacts").click()
    artifact = page.get_by_role("tabpanel", name="Artifacts")
    expect(artifact.get_by_text(ARTIFACT)).to_be_visible()
    for text in ("Strategy", "Threshold", "## Key Information", "2 pods are down: "):
        expect(artifact).to_contain_text(text)
    expect(artifact).not_to_contain_text("Now write the summary")
    save("artifact")
    page.get_by_role("tab", name="Info").click()
    page.get_by_role("button", name=LABEL).click()
    details = page.get_by_role("tabpanel", name="Info")
    page.locator("[mattooltip='State Changes']").click()
    expect(details.get_by_text(line)).to_be_visible()
    save("event")
    page.locator("[mattooltip='Raw JSON']").click()
    for key in ("context_guard", "compaction", "tokens_before", "tokens_after"):
        expect(details.get_by_text(key, exact=True)).to_be_visible()
    page.get_by_role("radio", name="Traces").click()
    page.get_by_text("context_guard.compact").click()
    expect(page.get_by_role("cell", name="context_guard.compact")).to_be_visible()
    page.locator("[mattooltip='Attributes']").click()
    save("traces")
    session = parse_qs(urlsplit(page.url).query)["session"][0]
    stored = page.request.get(f"{address}/apps/{app}/users/user/sessions/{session}")
    events = stored.json()["events"]
    entries = [(e.get("customMetadata") or {}).get("context_guard") for e in events]
    assert [event for event in events if event.get("errorCode")] == []
    assert sum("compaction" in entry for entry in entries if entry) == 1


def test_a_compaction_is_visible_in_the_web_ui(serve: Serve, page: Page) -> None:
    """State, artifact, event and traces show it; nothing reports an error."""
    address = serve(SAMPLES)
    talk_until_compacted(page, address, "guarded_agent")
    look_around(page, address, "guarded_agent", is_saved=True)
    page.reload()
    page.get_by_role("radio", name="Events").click()
    expect(page.get_by_role("button", name=f"Artifact: {ARTIFACT}")).to_be_visible()
    expect(page.get_by_text(ANSWER)).to_have_count(6)


def test_the_extra_plugin_guards_an_app_without_code(
    serve: Serve, page: Page, tmp_path: Path
) -> None:
    """`--extra_plugins` and a file guard an agent that knows nothing of the guard."""
    shutil.copytree(SAMPLES / "guarded_agent", tmp_path / "agents" / "plain")
    source = tmp_path / "agents" / "plain" / "agent.py"
    source.write_text(source.read_text().partition("\napp = App(")[0])
    config = tmp_path / "guard.toml"
    # So that each list of pods is shown whole, as in the sample.
    config.write_text(
        "summary_artifacts = true\n"
        "[default]\nstrategy = 'threshold'\ncontext_window = 8000\n"
        "preview_tokens = 0.2\n"
    )
    plugin = "--extra_plugins=contextguard_adk.ContextGuardPlugin"
    address = serve(source.parent.parent, plugin, CONTEXTGUARD_CONFIG=str(config))
    talk_until_compacted(page, address, "plain")
    look_around(page, address, "plain")


def save_top_of_report(page: Page) -> None:
    """Makes the picture of the documentation: all above the second chart."""
    end = page.locator("section").first.bounding_box()
    assert end
    height = end["y"] + end["height"] + 8
    page.screenshot(
        path=Path(SCREENSHOTS or "") / "report.png",
        full_page=True,
        clip={"x": 0, "y": 0, "width": 1200, "height": height},
    )


def test_a_report_shows_each_call_and_compaction(browser: Browser, report: str) -> None:
    """With mouse and keyboard, light and dark, on a phone."""
    context = browser.new_context(
        viewport={"width": 1200, "height": 800}, locale="en-US", color_scheme="light"
    )
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))

    page.goto(report)
    names = ("canvas", "#tokens-facts", "#tokens")
    charts, facts, tokens = (page.locator(name) for name in names)
    assert all(chart.evaluate(IS_DRAWN) for chart in charts.all())
    expect(facts).to_contain_text("agent")

    tokens.hover(position={"x": 600, "y": 100})
    middle = int(facts.locator("dd").first.inner_text())
    assert 1 < middle < CALLS
    expect(facts).to_contain_text("tools called")
    expect(facts).to_contain_text("without the guard (simulated)")

    if SCREENSHOTS:
        save_top_of_report(page)
    tokens.focus()
    for key, number in ("ArrowRight", middle + 1), ("Home", 1), ("End", CALLS):
        page.keyboard.press(key)
        expect(facts.locator("dd").first).to_have_text(str(number))
    # A click on a compaction leads to its card.
    place = page.evaluate(
        """() => {
          const chart = Chart.getChart("tokens");
          const sets = chart.data.datasets;
          const number = sets.findIndex(each => each.label === "compaction");
          const index = sets[number].data.findIndex(value => value !== null);
          const { x, y } = chart.getDatasetMeta(number).data[index];
          return { x, y };
        }"""
    )
    tokens.click(position=place)
    card = page.locator("article").first
    expect(card).to_be_focused()
    expect(card.locator("h3")).to_have_text("Compaction 1")
    card.get_by_text(re.compile("^The summary, ")).click()
    expect(card.locator("pre").first).to_contain_text(EVIL)
    card.get_by_text("What it took out").click()
    expect(card.locator("li").nth(1)).to_have_text("call of search, 0 characters")
    assert page.title() == "Context of a session"
    context.close()
    assert (said, asked) == ([], [report])


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_a_report_is_for_everybody(
    browser: Browser, report: str, color_scheme: Literal["light", "dark"]
) -> None:
    """axe finds nothing in it, all unfolded, and a phone need not scroll sideways."""
    context = browser.new_context(
        viewport={"width": 390, "height": 844},
        color_scheme=color_scheme,
        bypass_csp=True,  # The page lets nothing run but its own scripts.
    )
    page = context.new_page()
    page.goto(report)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert find_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    check_that_facts_hide_no_chart(page)
    context.close()


def find_violations(page: Page) -> list[tuple[str, str]]:
    """What axe finds: the name of each rule, and one element that breaks it."""
    found = Axe().run(page).response["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found]


def check_that_facts_hide_no_chart(page: Page) -> None:
    """Wherever the mouse is, a call's facts stand below the chart, inside the page."""
    for name in ("tokens", "made", "bill"):
        chart = page.locator(f"#{name}")
        facts = page.locator(f"#{name}-facts")
        chart.scroll_into_view_if_needed()
        size = chart.bounding_box()
        assert size
        number = facts.locator("dd").first

        for x in (size["width"] - 90, size["width"] / 2, 80.0):
            shown = number.inner_text()
            chart.hover(position={"x": x, "y": 60})
            expect(number).not_to_have_text(shown)
            below = facts.bounding_box()
            drawn = chart.bounding_box()
            assert below
            assert drawn
            assert below["y"] >= drawn["y"] + drawn["height"]
            assert below["x"] >= 0
            assert below["x"] + below["width"] <= 390


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_documentation_is_for_everybody(
    browser: Browser,
    documentation: list[str],
    width: int,
    color_scheme: Literal["light", "dark"],
) -> None:
    """axe finds nothing on any page, and no page scrolls sideways as a whole."""
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=color_scheme
    )
    page = context.new_page()
    found: dict[str, list[tuple[str, str]]] = {}
    widths: dict[str, int] = {}

    for address in documentation:
        page.goto(address)
        found[address] = find_violations(page)
        widths[address] = page.evaluate("document.documentElement.scrollWidth")
    context.close()

    assert len(documentation) > 30
    assert {address: each for address, each in found.items() if each} == {}
    assert {*widths.values()} == {width}
