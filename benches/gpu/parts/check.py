"""Every kernel against the CPU's, on random values: a process for each group and dtype."""

GROUPS = ["losses", "products", "rows", "attention"]


def run(bench):
    if bench.flags.kind != "cuda":
        return bench.row("kernels", "not run: --kind cpu")
    dtypes = list(dict.fromkeys([bench.flags.dtype, "f32"]))
    # The first group compiles all kernels of a dtype, unless they were carried here. If all groups
    # began at once, each would compile them.
    for groups in (GROUPS[:1], GROUPS[1:]):
        jobs = [(bench, dtype, group) for dtype in dtypes for group in groups]
        bench.commands.side_by_side(check, jobs, bench.program.at_once)


def check(bench, dtype, group):
    device = bench.program.device(dtype=dtype)
    argv = bench.program.argv("doctor", device, "--check", "--group", group)
    ended = bench.commands.run(f"check {group} in {dtype}", argv)
    kernels = [event for event in ended.events if event.get("event") == "check"]
    for event in kernels:
        figure = f"{event['kernel']} in {event['dtype']}"
        off, most = event["off"], event["tolerance"]
        about = {"cases": event["cases"], "seed": event["seed"], "detail": True}
        if event.get("error"):
            bench.row(figure, "failed", met=False, said=event["error"], **about)
            continue
        # JSON has no infinity. A kernel that writes what is not its own is off by that.
        fine = off is not None and off <= most
        off = "infinite" if off is None else off
        bench.row(figure, off, "largest difference", target=f"<= {most:g}", met=fine, **about)
    met = ended.status == 0 and bool(kernels)
    value = len(kernels) or f"failed: {ended.why}"
    bench.row(f"group {group} in {dtype}", value, "kernels" if kernels else "", met=met,
              target="none off", seconds=ended.seconds, said=ended.says,
              command=None if met else ended.argv)
