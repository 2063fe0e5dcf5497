"""A real browser without a window, for pages that are opened from disk."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def why_no_browser() -> str | None:
    """Why no page can be opened here, and what would change that; None where one can."""
    if _browser() is None:
        return f"no browser is installed (looked for {', '.join(_BROWSERS)}): `make browser`, or set BROWSER_BINARY"
    if shutil.which("chromedriver") is None:
        return "no chromedriver is installed: `make browser`"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install 'mrv2[dev]'"
    return None


def _browser() -> str | None:
    found = (shutil.which(name) for name in (os.environ.get("BROWSER_BINARY", ""), *_BROWSERS) if name)
    return next((path for path in found if path), None)


class Page:
    """One open page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(path.resolve().as_uri())

    def all(self, selector: str) -> list[Any]:
        """Elements that are shown."""
        return [e for e in self.driver.find_elements("css selector", selector) if e.is_displayed()]

    def click(self, selector: str, index: int = 0) -> None:
        self.all(selector)[index].click()

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def console(self) -> list[str]:
        """What the page said on the console since the last look."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses asked for since the last look, other than files and data in the page itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("file:", "data:", "about:"))]


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """A browser with a profile of its own, closed at the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _browser() or ""
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            page = Page(driver)
            driver.get("about:blank")
            page.requests()  # of the page that a browser starts with
            yield page
        finally:
            driver.quit()


if __name__ == "__main__":
    sys.exit(why_no_browser())
