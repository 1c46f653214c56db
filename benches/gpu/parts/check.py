"""Every kernel against the CPU's, on fresh random values: each group of kernels and dtype in a process of its own."""

GROUPS = ["losses", "products", "rows", "attention"]


def run(bench):
    if bench.flags.kind != "cuda":
        return bench.row("kernels", "not run: --kind cpu")
    # The first group compiles all kernels of a dtype, where no compiled ones were carried here. Were all
    # groups to begin at once, each would compile them.
    dtypes = list(dict.fromkeys([bench.flags.dtype, "f32"]))
    for groups in (GROUPS[:1], GROUPS[1:]):
        bench.commands.side_by_side(lambda dtype, group: check(bench, dtype, group), [(dtype, group) for dtype in dtypes for group in groups])


def check(bench, dtype, group):
    argv = bench.program.argv("doctor", bench.program.device(dtype=dtype), "--check", "--group", group)
    ended = bench.commands.run(f"check {group} in {dtype}", argv)
    kernels = [event for event in ended.events if event.get("event") == "check"]
    for event in kernels:
        off, tolerance = event["off"], event["tolerance"]
        figure, about = f"{event['kernel']} in {event['dtype']}", {"cases": event["cases"], "seed": event["seed"], "detail": True}
        if event.get("error"):
            bench.row(figure, "failed", met=False, said=event["error"], **about)
            continue
        # JSON has no infinity. A kernel that writes what is not its own is off by that.
        bench.row(figure, "infinite" if off is None else off, "largest difference", target=f"<= {tolerance:g}",
                  met=off is not None and off <= tolerance, **about)
    met = ended.status == 0 and bool(kernels)
    bench.row(f"group {group} in {dtype}", len(kernels), "kernels", target="none off", met=met, seconds=ended.seconds,
              said=ended.says, command=None if met else ended.argv)
