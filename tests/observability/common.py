"""Shared parts of the checks with real tools: a run of the program, its output, and Prometheus."""

import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"

# A small model with several layers.
MODEL = {
    "model.layers": 6,
    "model.hidden": 128,
    "model.heads": 4,
    "data.sequence_length": 64,
    "step.batch": 16,
    "step.micro_batch": 4,
    "step.steps": 100000,
    "metrics.run": "checked",
}
# Layers that the device visits: positions and dropout, the stack, the last norm, a tile of the head.
DEVICE_LAYERS = 9
# Layers with a block of their own: the head's tile is the embedding's.
OWNERS = 9


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(what, ask, seconds=60):
    """Calls `ask` until it returns an answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(0.1)
    raise SystemExit(f"no {what} within {seconds} s")


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


class Run:
    """`l2l train` in the background."""

    def __init__(self, program, settings, *arguments):
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.folder = tempfile.TemporaryDirectory()
        command = [program, "train", "--metrics", f"127.0.0.1:{self.port}", "--format", "json"]
        for key, value in {**MODEL, **settings}.items():
            command += ["--set", f"{key}={value}"]
        self.out = Path(self.folder.name, "out.jsonl")
        with open(self.out, "w") as out:
            self.process = subprocess.Popen([*command, *arguments], stdout=out, cwd=ROOT)
        until("run", lambda: get(self.address + "/readyz"))

    def events(self, kind=None):
        lines = self.out.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if kind in (None, event["event"])]

    def stop(self):
        """Interrupts the run, which finishes its step and ends."""
        self.process.send_signal(2)
        assert self.process.wait(120) == 130, self.process.returncode


class Prometheus:
    """Debian's Prometheus. It scrapes one run every second, with the project's own rules."""

    def __init__(self, port):
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        for name in ["rules.yml", "alerts.yml"]:
            (folder / name).write_text((DASHBOARDS / "prometheus" / name).read_text())
        config = (DASHBOARDS / "prometheus/prometheus.yml").read_text()
        config = config.replace("127.0.0.1:9464", f"127.0.0.1:{port}").replace(": 5s", ": 1s")
        (folder / "prometheus.yml").write_text(config)
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}/api/v1"
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=error",
        ]
        self.process = subprocess.Popen(command)
        until("Prometheus", lambda: get(f"http://127.0.0.1:{self.port}/-/ready"))

    def ask(self, how, **parameters):
        answer = get(f"{self.address}/{how}?{urllib.parse.urlencode(parameters)}")
        assert answer is not None, parameters
        answer = json.loads(answer)
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def now(self, query):
        return [(one["metric"], float(one["value"][1])) for one in self.ask("query", query=query)]

    def past(self, query, seconds):
        end = int(time.time())
        found = self.ask("query_range", query=query, start=end - seconds, end=end, step=1)
        return [(one["metric"], [(at, float(v)) for at, v in one["values"]]) for one in found]

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def panels():
    """Every query of every dashboard: title, query, legend."""
    for path in sorted((DASHBOARDS / "grafana/dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{dashboard['title']}, {panel['title']}", target["expr"], target["legendFormat"]


def filled(query):
    query = query.replace("$run", "checked").replace("$device", "cpu0").replace("$rank", "0")
    query = query.replace("$__rate_interval", "10s")
    assert not re.search(r"\$\w", query), query
    return query
