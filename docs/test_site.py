"""The built site in a browser, from disk: `make test-docs`. It is no part of `make test`, which needs neither."""

from __future__ import annotations

import functools
import re
import shutil
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)
PHONE, DESKTOP = (390, 844), (1280, 900)
SHOWN = (
    "index", "start", "from-torch", "api/index", "api/fjoin.train_step", "api/fjoin.transforms.power_sgd",
    "performance", "watching", "notebook", "gallery",
)  # fmt: skip
# The texts of what cannot be read in tables: in a column of a few letters, or beyond the edge of the screen and of a box that scrolls.
UNREADABLE = """
return [...document.querySelectorAll("article table")].flatMap(table => {
    const box = table.closest(".table-wrapper"), scrolls = box && getComputedStyle(box).overflowX === "auto"
    const words = table.classList.contains("words")
    const narrow = cell => cell.textContent.trim().length > 20 && cell.offsetWidth < (words ? 250 : 90)
    const outside = one => one.getBoundingClientRect().right > innerWidth
    const cells = [...table.querySelectorAll("td")]
    const inside = words || !scrolls ? [...table.querySelectorAll("*")] : []
    return [...cells.filter(narrow), ...inside.filter(outside)].map(one => one.textContent)
})
"""

pytestmark = pytest.mark.skipif(not (SITE / "docs" / "index.html").exists(), reason="no site: `make docs` builds it")


class Page(HTMLParser):
    """What a page points to, what others may point to in it, and its images without a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.places, self.mute = set[str](), {"", "top"}, list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        self.links |= {found[name] for name in ("href", "src") if name in found}
        # Sphinx gives an image without a text its path for one.
        if tag == "img" and (not found.get("alt") or found["alt"].endswith((".png", ".svg"))):
            self.mute.append(found.get("src", ""))


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    found = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(SITE.rglob("*.html"))}
    assert len(found) > 300
    return found


@functools.cache
def resolved(folder: Path, link: str) -> Path:
    return (folder / link).resolve()


def test_links_between_pages_lead_somewhere(pages: dict[Path, Page]) -> None:
    broken, inside = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            inside += 1
            target = resolved(path.parent, urllib.parse.unquote(parts.path)) if parts.path else path
            places = pages[target].places if target in pages else {""}
            if not target.is_file() or urllib.parse.unquote(parts.fragment) not in places:
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert inside > 10_000 and not broken, "\n".join(broken)


def test_images_have_a_text(pages: dict[Path, Page]) -> None:
    mute = [f"{path.relative_to(SITE)}: {source}" for path, page in pages.items() for source in page.mute]
    assert not mute, "\n".join(mute)


def test_pages_load_nothing_from_elsewhere() -> None:
    """Scripts, styles and fonts lie in the site, so it is whole without a network."""
    loads = re.compile(
        r"""<(?:script|img)[^>]*\ssrc="(?:https?:)?//|<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//"""
    )
    found = [str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if loads.search(path.read_text())]
    assert not found, found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: the extra `docs` has it")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip(f"no browser: one of {', '.join(BROWSERS)}, and chromedriver, are not on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    running.set_page_load_timeout(60)
    yield running
    running.quit()


def size(browser: Any, width: int, height: int) -> None:
    """Of the page, as on such a screen. A window cannot be as narrow as a phone."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def open_page(browser: Any, name: str) -> list[str]:
    """Opens a page from disk; the errors that it has written to the console."""
    browser.get_log("browser")
    browser.get((SITE / f"{name}.html").as_uri())
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def names() -> list[str]:
    """All pages but those of the source."""
    found = (path.relative_to(SITE).with_suffix("").as_posix() for path in sorted(SITE.rglob("*.html")))
    return [name for name in found if not name.startswith("_")]


def test_pages_fit_on_a_phone_and_write_no_errors(browser: Any) -> None:
    """Tables and code scroll in boxes of their own."""
    size(browser, *PHONE)
    faults = []
    for name in names():
        faults += [f"{name}: {error}" for error in open_page(browser, name)]
        # On a phone the theme has the column of the text scroll, and not the page.
        wide = "return Math.max(...[document.documentElement, ...document.querySelectorAll('.content')].map(e => e.scrollWidth))"
        if (width := browser.execute_script(wide)) > PHONE[0]:
            faults.append(f"{name} is {width} pixels wide")
        faults += [
            f"{name} has a table in which this cannot be read: {text}" for text in browser.execute_script(UNREADABLE)
        ]
    assert not faults, "\n".join(faults)


def test_the_first_screen_of_train_step_has_its_example(browser: Any) -> None:
    size(browser, *DESKTOP)
    open_page(browser, "docs/api/fjoin.train_step")
    example = browser.find_element("css selector", "article .highlight")
    assert "step.join(" in example.text and example.rect["y"] + example.rect["height"] < DESKTOP[1]


def test_links_and_pictures_work_in_the_browser(browser: Any) -> None:
    size(browser, *DESKTOP)
    for name in ("docs/index", "docs/gallery", "benchmarks/RESULTS_QUALITY"):
        open_page(browser, name)
        shown = "return [...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.src)"
        assert browser.execute_script(shown) == []
    open_page(browser, "docs/index")
    browser.find_element("css selector", ".bd-main a[href='start.html'], article a[href='start.html']").click()
    assert browser.current_url.endswith("docs/start.html") and "fjoin" in browser.title


def test_the_search_finds_a_name(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    size(browser, *DESKTOP)
    open_page(browser, "search")
    box = browser.find_element("css selector", "form input[name=q]")
    box.send_keys("power_sgd" + Keys.ENTER)
    link = "#search-results a[href*='fjoin.transforms.power_sgd.html']"
    WebDriverWait(browser, 30).until(lambda b: b.find_elements("css selector", link))
    browser.find_element("css selector", link).click()
    assert "fjoin.transforms.power_sgd.html" in browser.current_url
    assert "power_sgd" in browser.find_element("css selector", "article h1").text
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors, errors


def test_screenshots(browser: Any) -> None:
    """For people to look at: build/screenshots."""
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(exist_ok=True)
    for kind, (width, height) in {"phone": PHONE, "desktop": DESKTOP}.items():
        size(browser, width, height)
        for name in SHOWN:
            open_page(browser, f"docs/{name}")
            path = folder / f"{name.replace('/', '-')}-{kind}.png"
            assert browser.save_screenshot(str(path)) and path.stat().st_size > 5000
