"""Trains a model on file (parameters and moments), and compares the file lane with the disk.

    python3 benches/on_file.py [LAYERS [HIDDEN [STEPS [FOLDER]]]]

The disk's rate is measured with direct I/O before and after the run: 4 GiB are written and read
sequentially, with requests of the lane's size. The rates of reading and writing are averaged,
weighted by the bytes that a step reads and writes. The data is one short text, so that all steps are equal.
"""

import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHUNK = 4 << 20


def disk(folder, gibibytes=4):
    """Bytes a second written and read."""
    path, buffer = folder / "disk", mmap.mmap(-1, CHUNK)
    buffer.write(os.urandom(CHUNK))
    count = gibibytes * (1 << 30) // CHUNK
    rates = []
    for flags in (os.O_CREAT | os.O_WRONLY, os.O_RDONLY):
        file = os.open(path, flags | os.O_DIRECT)
        if flags & os.O_CREAT:
            os.posix_fallocate(file, 0, count * CHUNK)
        begin = time.monotonic()
        for nth in range(count):
            (os.pwritev if flags & os.O_CREAT else os.preadv)(file, [buffer], nth * CHUNK)
        if flags & os.O_CREAT:
            os.fdatasync(file)
        rates.append(count * CHUNK / (time.monotonic() - begin))
        os.close(file)
    path.unlink()
    return rates


def main():
    layers, hidden, steps = [
        int(a) for a in (sys.argv[1:4] + ["12", "1024", "3"][len(sys.argv) - 1 :])
    ]
    place = Path(sys.argv[4] if len(sys.argv) > 4 else tempfile.gettempdir()).resolve()
    program = Path(os.environ.get("L2L", "target/release/l2l")).resolve()
    with tempfile.TemporaryDirectory(dir=place) as folder:
        folder = Path(folder)
        (folder / "text.txt").write_text(
            "One text, again and again: what it says is soon known by heart."[:63]
        )
        config = folder / "run.toml"
        config.write_text(f"""
[model]
layers = {layers}
hidden = {hidden}
heads = {hidden // 64}
vocabulary = 256
positions = 64
[data]
train = "{folder}/text.txt"
sequence_length = 63
[step]
batch = 1
micro_batch = 1
steps = {steps}
[optimizer]
learning_rate = 1e-6
[eps]
tier = "file"
path = "{folder}/eps"
[metrics]
file = "{folder}/metrics"
[log]
format = "json"
""")
        plan = json.loads(
            subprocess.run([program, "plan", config], check=True, stdout=subprocess.PIPE).stdout
        )
        print(
            f"{plan['parameters'] / 1e9:.3f} B parameters, "
            f"{plan['file_bytes']['total'] / 1e9:.1f} GB of file, "
            f"{plan['host_bytes']['total'] / 2**20:.0f} MiB of host, "
            f"{plan['device_bytes']['total'] / 2**20:.0f} of device"
        )
        before = disk(folder)
        begin = time.monotonic()
        run = subprocess.run([program, "train", config], stdout=subprocess.PIPE, text=True)
        seconds = time.monotonic() - begin
        if run.returncode:
            sys.exit(run.returncode)
        after = disk(folder)
        events = [json.loads(line) for line in run.stdout.splitlines()]
        told = [event for event in events if event["event"] == "step"]
        for event in told:
            print(
                f"step {event['step']}: loss {event['loss']:.4f}, {event['seconds']:.1f} s, "
                f"resident {event['host_rss_bytes'] / 2**20:.0f} MiB"
            )
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        lane = [
            line
            for line in (folder / "metrics").read_text().splitlines()
            if line.startswith("l2l_lane_seconds_total") and 'lane="file"' in line
        ]
        busy = float(lane[0].rsplit(" ", 1)[1])
        read, written = plan["read_bytes"] * steps, plan["written_bytes"] * steps
        write, reads = [(one + other) / 2 for one, other in zip(before, after)]
        own = (read + written) / (read / reads + written / write)
        print(
            f"disk: {write / 1e9:.2f} GB/s written, {reads / 1e9:.2f} read; "
            f"as a step mixes them {own / 1e9:.2f}"
        )
        print(
            f"lane of files: {(read + written) / busy / 1e9:.2f} GB/s while it works, "
            f"{(read + written) / busy / own:.2f} of the disk's; "
            f"it works {busy / sum(event['seconds'] for event in told):.2f} of the steps' time"
        )
        print(f"peak resident {peak / 2**20:.0f} MiB, {seconds:.0f} s in all")


main()
