"""Trains for an hour while observers come and go, and checks that resident memory, open files and threads stay flat.

Observers scrape, keep the live page open, hold connections that send nothing or half a request, do not
read their answers, reset connections, and are killed. Every half a minute they pause until the
listener has closed their connections. Then the script measures the process: memory, files and threads
that are still in use are a leak. Prints a Markdown table, and exits with status 1 if something rises.

    cargo build --release && python3 benches/soak.py [--minutes 60] [--program target/release/l2l]
"""

import argparse
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = {
    "model.layers": 4,
    "model.hidden": 128,
    "model.heads": 4,
    "data.sequence_length": 64,
    "step.batch": 8,
    "step.micro_batch": 2,
    "step.steps": 10**9,
    "device.threads": 1,
    "validation.every_steps": 200,
    "validation.batches": 1,
    "checkpoint.every_steps": 500,
    "metrics.run": "soak",
}
PERIOD = 30  # seconds from one measurement to the next
QUIET = 7  # seconds of these without observers: the listener keeps no connection for more than 5
PAGES = ["/", "/metrics", "/live.json", "/healthz", "/readyz"]
# A client that sends requests and does not read the answers. It is killed.
CLIENT = """
import socket, sys, time
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.sendall(b"GET /live.json HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
print("asked", flush=True)
time.sleep(60)
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Observers:
    """Threads that observe the run. `quiet` pauses all of them at once."""

    def __init__(self, port):
        self.port, self.counts, self.lock = port, {}, threading.Lock()
        self.may_look, self.over = threading.Event(), threading.Event()
        self.may_look.set()
        kinds = [self.scrape, self.page, self.hold, self.unread, self.reset, self.killed]
        self.threads = [threading.Thread(target=self.repeat, args=(kind,)) for kind in kinds]
        for thread in self.threads:
            thread.start()

    def repeat(self, kind):
        while not self.over.is_set():
            if not self.may_look.wait(0.5):
                continue
            try:
                kind()
            except OSError:  # the listener closed it to make room for another client
                self.count(f"{kind.__name__}: closed")

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def sleep(self, seconds):
        end = time.monotonic() + seconds
        while self.may_look.is_set() and not self.over.is_set() and time.monotonic() < end:
            time.sleep(0.05)

    def get(self, page):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=20) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()  # for example, not ready
        self.count(page)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def scrape(self):
        self.get("/metrics")
        self.sleep(1)

    def page(self):
        self.get("/")
        for _ in range(random.randint(5, 20)):
            self.get("/live.json")
            self.sleep(random.choice([0.02, 1]))

    def hold(self):
        """More connections than one client may have, silent or in the middle of a request."""
        held = []
        try:
            for _ in range(random.randint(1, 60)):
                held.append(self.connect())
                said = [b"", b"G", b"GET /metrics HTTP/1.1\r\nHost: local", b"\x00\xff\r\n\r\n"]
                held[-1].sendall(random.choice(said))
                self.count("held open")
            self.sleep(random.uniform(0, 6))
        finally:
            for client in held:
                client.close()

    def unread(self):
        with self.connect() as client:
            client.sendall(b"GET /live.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.count("unread")
            self.sleep(random.uniform(0, 3))

    def reset(self):
        with self.connect() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(f"GET {random.choice(PAGES)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            self.count("reset")
        self.sleep(0.2)

    def killed(self):
        command = [sys.executable, "-c", CLIENT, str(self.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
            client.stdout.readline()
            client.kill()
        self.count("killed")
        self.sleep(2)

    def quiet(self, is_quiet):
        self.may_look.clear() if is_quiet else self.may_look.set()

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


def look(pid):
    """Resident bytes, open files and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (int(status.split(name)[1].split()[0]) for name in ["VmRSS:", "Threads:"])
    return resident * 1024, len(os.listdir(f"/proc/{pid}/fd")), threads


def least(pid, seconds=1):
    """The minimum of each over a second, because a checkpoint that is being written is no leak."""
    looks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        looks.append(look(pid))
        time.sleep(0.05)
    return tuple(map(min, zip(*looks)))


def soak(process, observers, minutes):
    """Measurements by time, and the maximum of each."""
    begin = time.monotonic()
    looks, most = [(0.0, least(process.pid))], look(process.pid)
    while time.monotonic() - begin < 60 * minutes:
        end = time.monotonic() + PERIOD - QUIET
        while time.monotonic() < end:
            most = tuple(map(max, most, look(process.pid)))
            time.sleep(0.2)
        observers.quiet(True)
        time.sleep(QUIET - 1)
        looks.append((time.monotonic() - begin, least(process.pid)))
        observers.quiet(False)
    return looks, most


def table(looks, most):
    """Prints the table. Returns whether nothing rises."""
    end = looks[-1][0]
    at = [min(looks, key=lambda one: abs(one[0] - share * end))[1] for share in (0, 0.1, 0.5, 1)]
    second = [one for one in looks if one[0] >= end / 2]
    flat = []
    print("| | start | after warm-up | middle | end | most | rise over the second half | |")
    print("|---|---|---|---|---|---|---|---|")
    for nth, name in enumerate(["resident memory, MiB", "open files", "threads"]):
        unit, digits = (2**20, 1) if nth == 0 else (1, 0)
        times, values = [one[0] for one in second], [one[1][nth] / unit for one in second]
        slope = statistics.linear_regression(times, values).slope
        rise = slope * (times[-1] - times[0])
        # A difference of one page is noise; a file or a thread is not.
        flat.append(rise < (0.01 * values[0] if nth == 0 else 0.5))
        cells = [f"{value[nth] / unit:.{digits}f}" for value in [*at, most]]
        cells.append(f"{rise:+.2f} ({slope * 3600:+.2f} an hour)")
        print(f"| {name} | {' | '.join(cells)} | {'flat' if flat[-1] else 'rises'} |")
    return all(flat)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--program", default="target/release/l2l")
    arguments = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [arguments.program, "train", "--metrics", f"127.0.0.1:{port}", "--format", "json"]
        for key, value in {**MODEL, "checkpoint.directory": f"{folder}/checkpoints"}.items():
            command += ["--set", f"{key}={value}"]
        log = Path(folder, "steps.jsonl")
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        observers = None
        try:
            while log.stat().st_size == 0:
                assert process.poll() is None, f"it ended with {process.returncode}"
                time.sleep(0.1)
            observers = Observers(port)
            looks, most = soak(process, observers, arguments.minutes)
        finally:
            if observers:
                observers.stop()
            process.send_signal(signal.SIGINT)
            status = process.wait(120)
        assert status == 130, status
        steps = sum('"event":"step"' in line for line in log.open())
    print(f"{looks[-1][0] / 60:.0f} minutes, {steps} steps, {len(looks)} looks\n")
    is_flat = table(looks, most)
    counts = ", ".join(f"{what} {count}" for what, count in sorted(observers.counts.items()))
    print(f"\nObservers: {counts}")
    sys.exit(not is_flat)


if __name__ == "__main__":
    main()
