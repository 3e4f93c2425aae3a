"""A real Chromium without a screen, driven by Selenium; Debian's package is installed if it is missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}  # and the packages that they are in
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1280,900")


@functools.cache
def why_no_browser() -> str | None:
    """Return why there is no Chromium here, after trying to install it, or None if there is."""
    packages = [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    if not packages:
        return None
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return f"needs {' and '.join(packages)}; installing them takes apt-get and root"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-qy", "--no-install-recommends", *packages]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"apt-get could not install {' and '.join(packages)}: {done.stderr.strip()[-300:]}"
    return None


@contextmanager
def opened_browser() -> Iterator[webdriver.Chrome]:
    """A browser of its own inside the block; it keeps a log of its console and of every request."""
    reason = why_no_browser()
    if reason is not None:
        raise RuntimeError(f"The browser {reason}.")
    options = webdriver.ChromeOptions()
    for option in OPTIONS:
        options.add_argument(option)
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def wait_until_drawn(browser: Any, timeout_s: float = 200) -> float:
    """Return when all charts of a report were drawn, in milliseconds since the navigation began."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ready = browser.execute_script("return window.cadenzaReady")
        if ready:
            return float(ready)
        time.sleep(0.05)
    raise TimeoutError("The charts of the report were not drawn in time.")
