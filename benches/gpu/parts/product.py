"""A large product in PyTorch. Without a pause, a card may lower its clock, for power or heat."""

from ..peer.call import has_torch, peer


def run(bench):
    if not has_torch(bench):
        return bench.row("a large product", "not run: this Python has no torch for the device")
    tries = [{"name": "in bursts", "seconds": 0},
             {"name": "without a pause", "seconds": 1 if bench.flags.quick else 10}]
    for name, told in peer(bench, "product", what="product", tries=tries).items():
        if "error" in told:
            bench.row(f"a large product {name}", f"failed: {told['error']}")
            continue
        rates = [rate / 1e12 for rate in told["rates"]]
        later = rates[len(rates) // 2:]
        bench.median(f"a large product {name}", later, "TFLOP/s", says="its second half")
