"""Headless Chromium opens the live page during a real run, and the report after it: nothing on the
console, no request but to the page's own origin, and bars that are what the JSON behind them says.

    python3 tests/observability/browser.py target/debug/l2l [FOLDER for screenshots]
"""

import json
import math
import statistics
import sys
from pathlib import Path
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from common import DEVICE_LAYERS, Run, get


def browser(dark=False):
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ["headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,1500"]:
        options.add_argument("--" + argument)
    if dark:
        options.add_argument("--force-dark-mode")
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))


def quiet(driver, origin):
    """The page writes nothing to the console, and sends requests to its own server alone."""
    console = driver.get_log("browser")
    assert not console, console
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            parts = urlsplit(url)
            assert parts.scheme == "data" or f"{parts.scheme}://{parts.netloc}" == origin, url


def shares(driver, table):
    bars = driver.find_elements(By.CSS_SELECTOR, f"#{table} .bar")
    return [float(bar.get_attribute("data-share")) for bar in bars]


def usable(driver):
    """Every picture and section has a name, and the keyboard reaches everything that scrolls."""
    for picture in driver.find_elements(By.CSS_SELECTOR, "svg[role=img]"):
        assert picture.get_attribute("aria-label"), picture
        assert picture.get_attribute("tabindex") == "0"
    for section in driver.find_elements(By.TAG_NAME, "section"):
        named = section.get_attribute("aria-label") or section.find_elements(By.TAG_NAME, "h2")
        assert named, section.text
    assert driver.find_element(By.ID, "status").get_attribute("aria-live") == "polite"
    for header in driver.find_elements(By.CSS_SELECTOR, "thead th"):
        assert header.get_attribute("scope") == "col"
    assert driver.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"


def bars_are(view, driver):
    """The drawings have the numbers of the view."""
    memory = [share(one["used"], one["planned"]) for one in view["device_memory"]]
    assert all(map(near, shares(driver, "memory"), memory)), (memory, shares(driver, "memory"))
    layers = [one["overlap"] or 0 for one in view["layers"] if one["on_device"]]
    assert len(layers) == DEVICE_LAYERS
    assert all(map(near, shares(driver, "layers"), layers)), (layers, shares(driver, "layers"))
    channels = [share(one["depth"], one["capacity"]) for one in view["channels"]]
    assert all(map(near, shares(driver, "channels"), channels))
    for lane in {one["track"] for one in view["slices"]}:
        of_lane = [one for one in view["slices"] if one["track"] == lane]
        drawn = driver.find_elements(By.CSS_SELECTOR, f'#timeline g[data-lane="{lane}"] rect')
        assert len(drawn) == len(of_lane), (lane, len(drawn), len(of_lane))
    begin = min(one["begin"] for one in view["slices"])
    span = max(one["end"] for one in view["slices"]) - begin
    first = [one for one in view["slices"] if one["track"] == "compute"][0]
    drawn = driver.find_element(By.CSS_SELECTOR, '#timeline g[data-lane="compute"] rect')
    width = float(drawn.get_attribute("width"))
    shown = float(driver.find_element(By.CSS_SELECTOR, "#timeline svg").get_dom_attribute("viewBox").split()[2])
    expected = max(0.3, (shown - 74 - 8) * (first["end"] - first["begin"]) / span)
    assert math.isclose(width, expected, rel_tol=0.01, abs_tol=0.01), (width, expected)
    points = driver.find_element(By.CSS_SELECTOR, "#loss svg").get_attribute("data-points")
    assert int(points) == len(view["losses"])


def fits_a_phone(driver):
    """At a phone's width nothing is cut off, and text in drawings can be read."""
    size = driver.get_window_size()
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 375, "height": 812, "deviceScaleFactor": 2, "mobile": True})
    texts = "return [...document.querySelectorAll('#timeline svg text')].map(t => t.getBoundingClientRect().height)"
    WebDriverWait(driver, 20).until(lambda d: (lambda all: all and min(all) >= 11)(d.execute_script(texts)))
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 375
    # In one call: a page draws all again when its size has changed.
    assert "layer 0" in driver.execute_script("return document.querySelector('#timeline .legend').innerText")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.set_window_size(size["width"], size["height"])


def share(a, b):
    return a / b if b else 0


def near(a, b):
    return abs(a - max(0, min(1, b))) < 0.001


def main():
    program, pictures = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None
    settings = {"device.link": "400MB/s", "validation.every_steps": 10, "validation.batches": 1}
    folder = Path("target/report").resolve()
    run = Run(program, settings, "--report", str(folder))
    try:
        driver = browser()
        driver.get(run.address + "/")
        # What the page drew, beside what it drew it from.
        driver.execute_script("window.drawn = null; const before = show; show = view => { before(view); window.drawn = view; };")
        wait = WebDriverWait(driver, 60)
        wait.until(lambda d: d.execute_script("return drawn && drawn.step > 25 && drawn.slices.length > 0"))
        look = "drawn = null; return new Promise(done => { const wait = () => drawn ? done(JSON.stringify(drawn)) : setTimeout(wait, 20); wait(); })"
        first = json.loads(driver.execute_script(look))
        # It updates itself. A validation and its sample may come before the next step.
        wait.until(lambda d: json.loads(d.execute_script(look))["step"] > first["step"])
        # Stop it from updating while it is compared.
        held = "window.fetch = () => new Promise(() => {}); return new Promise(done => setTimeout(() => done(JSON.stringify(drawn)), 1500))"
        view = json.loads(driver.execute_script(held))
        bars_are(view, driver)
        usable(driver)
        quiet(driver, run.address)
        assert get(run.address + "/healthz") == "ok\n"
        if pictures:
            driver.save_screenshot(str(pictures / "live.png"))
        driver.quit()
        driver = browser(dark=True)
        driver.get(run.address + "/")
        WebDriverWait(driver, 60).until(lambda d: d.find_elements(By.CSS_SELECTOR, "#timeline svg"))
        fits_a_phone(driver)
        colours = "return [matchMedia('(prefers-color-scheme: dark)').matches, getComputedStyle(document.body).backgroundColor]"
        is_dark, paper = driver.execute_script(colours)
        assert is_dark and paper == "rgb(13, 17, 23)", (is_dark, paper)
        quiet(driver, run.address)
        driver.quit()
    finally:
        run.stop()
    driver = browser()
    report = folder / "report.html"
    driver.get(report.as_uri())
    data = json.loads(driver.execute_script("return document.getElementById('embedded').textContent"))
    bars_are(data["view"], driver)
    usable(driver)
    quiet(driver, "file://")
    titles = [one.text for one in driver.find_elements(By.TAG_NAME, "h2")]
    for title in ["Loss", "Lanes", "Overlap by layer", "Device memory", "Configuration", "Versions"]:
        assert title in titles, titles
    last = run.events("step")[-1]
    assert math.isclose(data["view"]["loss"], last["loss"])
    fits_a_phone(driver)
    # The headline is the run's, not the last step's.
    texts = "return ['dt', 'dd'].map(tag => [...document.querySelectorAll('#facts ' + tag)].map(one => one.innerText))"
    facts = dict(zip(*driver.execute_script(texts)))
    step_seconds = [one["seconds"] for one in run.events("step")]
    shown, unit = facts["mean step time"].split(" ")
    shown = float(shown.replace(",", "")) / (1000 if unit == "ms" else 1)
    # Seconds of a step line have what was between steps, such as a validation.
    assert math.isclose(shown, statistics.median(step_seconds), rel_tol=0.3), (facts, step_seconds)
    exposed = sum(one["exposed_wait_seconds"] for one in run.events("step"))
    print(f"report: {len(data['view']['slices'])} operations, exposed wait {exposed:.3f} s of {data['view']['seconds']:.1f}")
    if pictures:
        driver.save_screenshot(str(pictures / "report.png"))
    driver.quit()
    print("pages: drawn as told, quiet, to themselves")


if __name__ == "__main__":
    main()
