"""The search page in a real browser: headless Chromium, driven as a person would use it.

``EMBED_CORPUS_SCREENSHOTS=FOLDER`` keeps pictures of what it showed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_shard
from tests.serve import Server, running_server, stand_in_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"),
]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--window-size=900,900",
)  # fmt: skip
HOSTILE = "<img src=x onerror=\"document.title='broken into'\"><b>bold</b>"
TEXTS = [HOSTILE, *(f"sentence number {number} about boats" for number in range(30))]
KEY = "page-secret-key"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_shard(folder / "in" / "a.parquet", TEXTS)
    stand_in_run(folder / "in", folder / "out", model_dir)
    return folder / "out"


@pytest.fixture(scope="module")
def server(output: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("log"), str(output), "--query-lane", "torch") as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(executable_path=DRIVER))
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def hits(browser: Any) -> list[str]:
    return [item.text for item in browser.find_elements("css selector", "#hits li")]


def wait_for(browser: Any, is_so: Callable[[Any], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60, poll_frequency=0.1).until(is_so)


def ask(browser: Any, text: str) -> str:
    """Type a query, press Enter, wait for what the page says then."""
    from selenium.webdriver.common.keys import Keys

    browser.execute_script("document.getElementById('status').textContent = ''")
    field = find(browser, "#query")
    field.clear()
    field.send_keys(text, Keys.ENTER)
    said = wait_for(browser, lambda page: (text := find(page, "#status").text) and text != "Searching …" and text)
    return str(said)


def keep_picture(browser: Any, name: str) -> None:
    if folder := os.environ.get("EMBED_CORPUS_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def console_errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_query_shows_hits_with_score_text_and_timing(server: Server, browser: Any) -> None:
    from selenium.webdriver.support.ui import Select

    browser.get(server.url)
    assert browser.switch_to.active_element.get_attribute("id") == "query", "one can type at once"
    said = ask(browser, TEXTS[7])
    assert said.startswith("10 hits in ") and "compute" in said and "search" in said
    first = hits(browser)[0]
    assert first.startswith("1.0000") and TEXTS[7] in first and "a-7" in first
    Select(find(browser, "#k")).select_by_visible_text("5")
    assert ask(browser, "boats").startswith("5 hits in ") and len(hits(browser)) == 5
    keep_picture(browser, "page")
    assert console_errors(browser) == []


def test_what_a_text_holds_is_shown_and_never_run(server: Server, browser: Any) -> None:
    browser.get(server.url)
    ask(browser, HOSTILE)
    assert HOSTILE in hits(browser)[0]
    assert not browser.find_elements("css selector", "#hits img, #hits b")
    assert browser.title == "Search the corpus"


def test_the_policy_stops_a_script_that_is_not_the_pages_own(server: Server, browser: Any) -> None:
    browser.get(server.url)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
    )
    assert browser.title == "Search the corpus"
    blocked = wait_for(browser, console_errors)
    assert any("Content Security Policy" in message for message in blocked)


def test_nothing_is_loaded_from_anywhere_else(server: Server, browser: Any) -> None:
    import json

    browser.get_log("performance")
    browser.get(server.url)
    ask(browser, "boats")
    find(browser, "footer a").click()
    wait_for(browser, lambda page: page.find_elements("css selector", "h2"))
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert f"{server.url}/search" in urls and f"{server.url}/docs" in urls
    assert [url for url in urls if not url.startswith((server.url, "data:"))] == []
    assert console_errors(browser) == []


def test_the_page_can_be_used_without_seeing_it(server: Server, browser: Any) -> None:
    browser.get(server.url)
    assert find(browser, "html").get_attribute("lang") == "en"
    for control in ("#query", "#k", "#key"):
        name = control.removeprefix("#")
        assert find(browser, f"label[for={name}]").get_attribute("textContent").strip()
    assert find(browser, "#query").accessible_name == "Query"
    assert find(browser, "#query").aria_role == "searchbox"
    assert find(browser, "#status").get_attribute("aria-live") == "polite"
    assert find(browser, "#hits").accessible_name == "Hits"
    assert not find(browser, "#key").is_displayed()
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_an_error_is_said_and_old_hits_are_gone(output: Path, browser: Any, tmp_path: Path) -> None:
    with running_server(tmp_path, str(output), "--query-lane", "torch") as server:
        browser.get(server.url)
        ask(browser, "boats")
        assert len(hits(browser)) == 10
    assert ask(browser, "boats") == "The server cannot be reached."
    assert hits(browser) == [] and "error" in find(browser, "#status").get_attribute("class")


def test_a_key_is_asked_for_where_one_is_needed(output: Path, browser: Any, tmp_path: Path) -> None:
    environ = {"EMBED_CORPUS_SERVE_API_KEYS": f'{{"page": "{KEY}"}}'}
    with running_server(tmp_path, str(output), "--query-lane", "torch", environ=environ) as server:
        browser.get(server.url)
        assert "API key" in ask(browser, "boats") and hits(browser) == []
        assert find(browser, "#key").is_displayed()
        find(browser, "#key").send_keys(KEY)
        assert ask(browser, "boats").startswith("10 hits")
        keep_picture(browser, "page-with-key")
        assert KEY not in server.log.read_text(encoding="utf-8")


def test_a_long_text_does_not_break_the_page(tmp_path: Path, browser: Any, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "a.parquet", ["x" * 5_000, "word " * 400])
    stand_in_run(tmp_path / "in", tmp_path / "out", model_dir)
    with running_server(tmp_path / "log", str(tmp_path / "out"), "--query-lane", "torch") as server:
        browser.set_window_size(400, 800)
        try:
            browser.get(server.url)
            assert ask(browser, "x").startswith("2 hits")
            keep_picture(browser, "page-narrow")
            assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        finally:
            browser.set_window_size(900, 900)


def test_a_new_query_takes_the_place_of_one_that_is_under_way(output: Path, browser: Any, tmp_path: Path) -> None:
    environ = {"STAND_IN_SECONDS": "1"}
    with running_server(tmp_path, str(output), "--query-lane", "torch", environ=environ) as server:
        browser.get(server.url)
        field = find(browser, "#query")
        from selenium.webdriver.common.keys import Keys

        field.send_keys(TEXTS[3], Keys.ENTER)
        ask(browser, TEXTS[9])
        assert TEXTS[9] in hits(browser)[0]
