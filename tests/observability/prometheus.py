"""A real Prometheus scrapes real runs. Every panel and rule has data, the data equals the run's own
JSON lines, and rule, step line and `l2l tune` name the bottleneck of each of four regimes.

    python3 tests/observability/prometheus.py target/debug/l2l
"""

import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from common import DEVICE_LAYERS, MODEL, OWNERS, ROOT, Prometheus, Run, filled, get, panels, until

WATCHED = 25  # seconds that panels look back on
OF_EXPERTS = ["Load of experts", "Idle experts and dropped choices", "Routers"]


@contextmanager
def scraped(program, settings):
    """A run and its Prometheus, until the block ends. The run ends first: it waits for a last scrape. It also ends if
    Prometheus does not start."""
    run = Run(program, settings)
    prometheus = None
    try:
        prometheus = Prometheus(run.port)
        yield run, prometheus
    finally:
        run.stop()
        if prometheus:
            prometheus.stop()


def of_experts(title):
    return any(title.endswith(name) for name in OF_EXPERTS)


def series_of(prometheus, title, query):
    """What a panel shows, and how many numbers each of its series has."""
    series = prometheus.past(filled(query), WATCHED - 10)
    finite = [sum(math.isfinite(value) for _, value in values) for _, values in series]
    assert finite and (max(finite) >= 2), f"{title}: {query}: {series}"
    return series, finite


def panels_of_experts_have_data(program):
    small = {"model.preset": "moe-small", "model.expert_intermediate": 32}
    settings = {**small, "experts.balance_loss": 0.01, "experts.z_loss": 0.001}
    with scraped(program, settings) as (_, prometheus):
        until("experts", lambda: prometheus.now("l2l_router_entropy > 0") or None)
        time.sleep(WATCHED)
        shown = [(title, query) for title, query, _ in panels() if of_experts(title)]
        assert len({title for title, _ in shown}) == len(OF_EXPERTS), shown
        for title, query in shown:
            series_of(prometheus, title, query)
        print(f"panels of experts: {len(shown)} queries")


def panels_have_data(program):
    settings = {
        "checkpoint.every_steps": 20,
        "checkpoint.keep": 1,
        "checkpoint.directory": ROOT / "target/observed",
        "validation.every_steps": 10,
        "validation.batches": 1,
        "device.link": "300MB/s",
    }
    with scraped(program, settings) as (run, prometheus):
        until("checkpoint", lambda: prometheus.now('l2l_checkpoint_last_success_timestamp_seconds > 0') or None)
        until("rules", lambda: prometheus.now('l2l:layer_overlap:ratio') or None)
        time.sleep(WATCHED)
        count = 0
        for title, query, legend in panels():
            if title.startswith("l2l: ranks") or of_experts(title):
                continue  # this run has one process and no experts
            series, finite = series_of(prometheus, title, query)
            if legend == "{{layer}}":
                layers = OWNERS if "updates" in query else DEVICE_LAYERS
                assert len(series) == layers, f"{title}: {len(series)} series, not {layers}"
                assert min(finite) >= 2, f"{title}: {query}"
            count += 1
        rules = json.loads(get(f"{prometheus.address}/rules"))
        groups = [rule for group in rules["data"]["groups"] for rule in group["rules"]]
        assert len(groups) >= 15 and all(rule["health"] == "ok" for rule in groups), groups
        values_are_the_runs(run, prometheus)
        print(f"panels: {count} queries, {len(groups)} rules")


def values_are_the_runs(run, prometheus):
    """At every scrape, gauges and counters equal those of the run's last step."""
    steps = {event["step"]: event for event in run.events("step")}
    tokens, total = {}, 0
    for step, event in sorted(steps.items()):
        total += event["tokens"]
        tokens[step] = total
    at_scrapes = {}
    for name in ["step", "loss", "grad_norm", "learning_rate", "tokens_total", "memory"]:
        query = "sum(l2l_device_memory_bytes)" if name == "memory" else f"l2l_{name}"
        [(_, values)] = prometheus.past(query, WATCHED)
        for at, value in values:
            at_scrapes.setdefault(at, {})[name] = value
    seen = 0
    for at, found in at_scrapes.items():
        event = steps.get(int(found.get("step", 0)))
        if event is None or len(found) < 6:
            continue
        told = {
            **{name: event[name] for name in ["loss", "grad_norm", "learning_rate"]},
            "tokens_total": tokens[event["step"]],
            "memory": event["device_peak_bytes"],
        }
        for name, value in told.items():
            assert math.isclose(found[name], value, rel_tol=0.01), (name, at, found, event)
        seen += 1
    assert seen >= 10, seen
    print(f"values: {seen} scrapes within 1 % of the JSON lines")


# So few tokens that also a program without optimization computes for a small part of a step.
FEW = {"data.sequence_length": 16, "step.batch": 8, "step.micro_batch": 2}
REGIMES = {
    "upload": {**FEW, "device.link": "20MB/s", "stash.place": "device"},
    # On a fast machine a step of this model is so short that the host has a tenth of it.
    "compute": {"device.flop_rate": "30GFLOP/s"},
    "update": {**FEW, "eps.update_rate": "20MB/s"},
    "disk": {
        **FEW,
        "eps.disk_rate": "40MB/s",
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 1,
        "checkpoint.directory": ROOT / "target/observed/disk",
    },
}
# Regimes whose runs wait nearly all of the time: two at a time run side by side.
WAITING = ["upload", "update", "disk"]
# Channels that are too shallow, which tune has to improve.
SHALLOW = {
    "channels.weights": 1,
    "channels.gradients": 1,
    "channels.reduced": 1,
    "channels.stash": 1,
}


def regime(program, name, settings):
    with scraped(program, settings) as (run, prometheus):
        time.sleep(15)
        named = until("bottleneck", lambda: prometheus.now("l2l:bottleneck:share") or None)
        [(labels, share)] = named
        assert labels["bottleneck"] == name, f"{name}: the rule says {named}"
        view = json.loads(get(run.address + "/live.json"))
        assert view["bottleneck"] == name, f"{name}: the step line says {view['bottleneck']}"
        overlap = prometheus.now("l2l:overlap:ratio")[0][1]
        print(f"{name}: rule and step line say so ({share:.2f}), overlap {overlap:.2f}")


def tuned(program, name, settings):
    command = [program, "tune", "--format", "json", "--rounds", "3"]
    for key, value in {**MODEL, **settings, **SHALLOW}.items():
        command += ["--set", f"{key}={value}"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    events = [json.loads(line) for line in lines.splitlines()]
    kept = events[-1]
    assert kept["event"] == "tuned" and kept["bottleneck"] == name, f"{name}: {kept}"
    print(f"{name}: tune says so, {kept['own_step_seconds']:.3f} to {kept['step_seconds']:.3f} s: {kept['why']}")
    return kept


def regime_is_named(program, name):
    """By the rule, the step line and tune."""
    settings = REGIMES[name]
    regime(program, name, settings)
    if name != "upload":
        tuned(program, name, settings)
        return
    # A device of this rate computes for about half of the time that the link takes, on any machine. So tune can hide
    # half of the transfers.
    kept = tuned(program, name, {**settings, "device.flop_rate": "4GFLOP/s"})
    assert kept["weights"] >= 2, kept
    assert kept["step_seconds"] < 0.9 * kept["own_step_seconds"], kept


def main():
    program = sys.argv[1]
    subprocess.run(["rm", "-rf", str(ROOT / "target/observed")], check=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda has_data: has_data(program), [panels_have_data, panels_of_experts_have_data]))
    regime_is_named(program, "compute")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: regime_is_named(program, name), WAITING))
    # Two slots let a block arrive under the layer before it; with one, the overlap falls.
    link = {"device.link": "100MB/s", "stash.place": "device", "channels.stash": 16}
    deep = regime_overlap(program, {**link, "channels.weights": 2})
    shallow = regime_overlap(program, {**link, "channels.weights": 1})
    assert shallow + 0.1 < deep, (shallow, deep)
    print(f"overlap: {deep:.2f} with two weight slots, {shallow:.2f} with one")
    subprocess.run(["rm", "-rf", str(ROOT / "target/observed")], check=True)


def regime_overlap(program, settings):
    with scraped(program, settings) as (_, prometheus):
        time.sleep(12)
        return until("overlap", lambda: prometheus.now("l2l:overlap:ratio") or None)[0][1]


if __name__ == "__main__":
    main()
