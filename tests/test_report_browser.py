"""The page of `contextguard report` in a real browser (`pytest -m browser`).

Needs the extra `browser` and Chromium, which playwright does not bring along. With
CONTEXTGUARD_SCREENSHOTS=DIR a picture of the page is saved there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the extra `browser` is not installed")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._tools.cli import main
from tests.test_replay import CALLS, WINDOW, record

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

SCREENSHOTS = os.environ.get("CONTEXTGUARD_SCREENSHOTS")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PRICES = "[prices.simulated]\ninput = 1.25\ncached_input = 0.125\noutput = 10.0\n"

IS_DRAWN = """
canvas => canvas.getContext("2d")
  .getImageData(0, 0, canvas.width, canvas.height).data.some(byte => byte)
"""
EVIL = (
    "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page about a guarded session in which somebody wrote markup."""
    folder = tmp_path_factory.mktemp("report")
    guard = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    session, _ = asyncio.run(record([guard], has_cache=True))
    for event in session.events:
        if event.usage_metadata:
            event.model_version = "simulated"
        summaries = event.actions.state_delta
        if text := summaries.get("__context_guard_summary_agent"):
            summaries["__context_guard_summary_agent"] = f"{EVIL}\n{text}"
    (folder / "guard.toml").write_text(PRICES)
    (folder / "session.json").write_text(session.model_dump_json())
    page, config = folder / "report.html", str(folder / "guard.toml")
    command = ["report", str(folder / "session.json"), "--config", config]
    assert main([*command, "-o", str(page)]) == 0
    return page.as_uri()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    """Headless Chromium; it has an event loop, so the page is written before."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The opened page; the test fails where it asked for anything or complained."""
    context = browser.new_context(
        viewport={"width": 1200, "height": 800}, locale="en-US", color_scheme="light"
    )
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    yield page
    context.close()
    assert said == []
    assert asked == [address]


def test_the_charts_are_drawn_and_tell_of_each_call(page: Page) -> None:
    """With the mouse and with the keyboard; a click leads to the compaction."""
    assert page.title() == "Context of a session"
    for chart in page.locator("canvas").all():
        assert chart.evaluate(IS_DRAWN)
    facts = page.locator("#facts")
    expect(facts).to_contain_text("agent")
    tokens = page.locator("#tokens")
    tokens.hover(position={"x": 600, "y": 100})
    middle = int(facts.locator("dd").first.inner_text())
    assert 1 < middle < CALLS
    expect(facts).to_contain_text("tools called")
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / "report.png")

    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(facts.locator("dd").first).to_have_text(str(middle + 1))
    page.keyboard.press("Home")
    expect(facts.locator("dd").first).to_have_text("1")
    page.keyboard.press("End")
    expect(facts.locator("dd").first).to_have_text(str(CALLS))


def test_a_click_on_a_compaction_leads_to_its_card(page: Page) -> None:
    """The card gets the focus; its summary is text, whatever it says."""
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
    page.locator("#tokens").click(position=place)
    card = page.locator("article").first
    expect(card).to_be_focused()
    expect(card.locator("h3")).to_have_text("Compaction 1")
    card.get_by_text("What the summary says").click()
    expect(card.locator("pre")).to_contain_text(EVIL)
    card.get_by_text("What it took out").click()
    expect(card.locator("li").nth(1)).to_have_text("call of search, 0 characters")
    assert page.title() == "Context of a session"


def test_light_and_dark_can_be_chosen(page: Page) -> None:
    """The system's choice counts first; the button turns it around."""
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    before = page.locator("#tokens").screenshot()
    page.get_by_role("button", name="Dark").click()
    dark = page.evaluate(background)
    assert dark != light
    assert page.locator("#tokens").screenshot() != before
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == light


def test_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    """At 390 pixels, with everything opened."""
    page.set_viewport_size({"width": 390, "height": 844})
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for chart in page.locator("canvas").all():
        assert chart.evaluate(IS_DRAWN)
        box = chart.bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_without_javascript_the_figures_are_there(
    browser: Browser, address: str
) -> None:
    """The table has a row for each call, and the cards stand."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    page.get_by_text("Show the table").click()
    assert page.locator("tbody tr").count() == CALLS
    expect(page.locator("tbody")).to_be_visible()
    assert page.locator("article").count() >= 2
    context.close()
