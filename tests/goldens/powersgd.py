"""Reference values for PowerSGD gradient compression with error feedback.

This script makes `powersgd.json`: for a few small matrices it runs 20 steps of
rank-r PowerSGD with warm start and writes down the decompressed gradient sums
and the norms of the errors that are kept back. The method is that of Vogels,
Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization" (2019, arXiv 1905.13727), Algorithms 1 and 2, with one
difference: the groups' gradients are added, not averaged. All arithmetic is in
64-bit floats, and the gradients come from a closed formula, so the JSON file
does not hold them. Numbers in the file have 9 significant digits.

How to run it: `pip install torch && python powersgd.py`. It takes seconds on a
CPU and writes `powersgd.json` beside the script.
"""

import json
import math
from pathlib import Path

import torch

DTYPE = torch.float64
STEPS = 20
KEPT_STEPS = (0, 1, 9, 19)
CASES = (
    {"shapes": [(24, 18), (7, 40)], "rank": 2, "groups": 2},
    {"shapes": [(33, 20)], "rank": 4, "groups": 3},
    {"shapes": [(16, 16)], "rank": 1, "groups": 1},
)
TOLERANCE = 1e-10
OUT = Path(__file__).resolve().parent / "powersgd.json"


# The data. Every index (i, j, c, g, t, k) counts from 0.


def gradient(n, m, g, t, k):
    """Gradient of group g at step t for tensor number k, an (n, m) matrix."""
    i1 = torch.arange(1, n + 1, dtype=DTYPE).unsqueeze(1)
    j1 = torch.arange(1, m + 1, dtype=DTYPE).unsqueeze(0)
    wave = torch.sin(0.7 * i1 + 1.3 * j1 + 2.1 * g + 0.9 * k)
    wave = wave * torch.cos(0.37 * t + 0.11 * i1 * j1)
    return wave + 0.25 * torch.sin(3.1 * i1 * (g + 1) - 0.5 * j1 + t)


def first_q(m, rank, k):
    """The (m, rank) matrix Q that the first step starts from."""
    j1 = torch.arange(1, m + 1, dtype=DTYPE).unsqueeze(1)
    c1 = torch.arange(1, rank + 1, dtype=DTYPE).unsqueeze(0)
    return torch.cos(1.7 * j1 + 0.6 * c1 + 0.3 * k) + 0.5 * torch.sin(2.9 * j1 * c1)


# The method.


def orthonormalise(p):
    """Modified Gram-Schmidt over the columns of p, in order.

    Also returns the smallest share of its length that a column still had when
    its turn came; near 0 would mean that the columns are almost dependent.
    """
    p = p.clone()
    rank = p.shape[1]
    lengths = torch.linalg.vector_norm(p, dim=0)
    share = math.inf
    for i in range(rank):
        length = torch.linalg.vector_norm(p[:, i])
        share = min(share, (length / lengths[i]).item())
        p[:, i] /= length
        for later in range(i + 1, rank):
            p[:, later] -= torch.dot(p[:, i], p[:, later]) * p[:, i]
    return p, share


class PowerSGD:
    """The state for one tensor: the warm-started Q and one error per group."""

    def __init__(self, n, m, groups, q):
        self.q = q.clone()
        self.errors = [torch.zeros(n, m, dtype=q.dtype) for _ in range(groups)]

    def step(self, grads):
        """Takes one gradient per group; returns the decompressed sum M_hat."""
        self.inputs = [grad + error for grad, error in zip(grads, self.errors)]
        p = sum(mat @ self.q for mat in self.inputs)
        p_hat, self.share = orthonormalise(p)
        group_qs = [mat.T @ p_hat for mat in self.inputs]
        self.errors = [
            mat - p_hat @ q_g.T for mat, q_g in zip(self.inputs, group_qs)
        ]
        self.p, self.p_hat, self.q = p, p_hat, sum(group_qs)
        return p_hat @ self.q.T


# The checks.


class Worst:
    """Remembers the largest difference that each check met."""

    def __init__(self):
        self.seen = {}
        self.share = math.inf  # the smallest that Gram-Schmidt met

    def check(self, name, left, right, tolerance=TOLERANCE):
        diff = (left - right).abs().max().item()
        assert diff <= tolerance, f"{name}: differs by {diff:.3e}"
        self.seen[name] = max(self.seen.get(name, 0.0), diff)


class TorchHook:
    """One process of PyTorch's own powerSGD_hook, fed one tensor at a time.

    With one process the hook's average over processes is the gradient itself,
    so it has to agree with one group that holds the summed gradient. Its state
    begins with the same Q and a zero error.
    """

    @staticmethod
    def available():
        return torch.distributed.is_available() and torch.distributed.is_gloo_available()

    def __init__(self, n, m, rank, q):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        self.hook = hooks.powerSGD_hook
        self.shape = (n, m)
        self.state = hooks.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=0.5,  # so that no matrix here is sent whole
            use_error_feedback=True,
            warm_start=True,
            orthogonalization_epsilon=0,
        )
        self.state.iter = self.state.start_powerSGD_iter
        # The hook computes P from the stored Q after orthonormalising it, so the
        # columns' span counts, not their lengths. It stores one flat buffer per
        # bucket; with one matrix in the bucket that is Q row by row.
        self.state.q_memory_dict[0] = q.clone().reshape(-1)
        self.state.p_memory_dict[0] = torch.empty(n * rank, dtype=DTYPE)
        self.state.error_dict[0] = torch.zeros(n * m, dtype=DTYPE)

    def step(self, grad):
        return self.hook(self.state, _Bucket(grad)).wait().reshape(self.shape).clone()

    def error(self):
        return self.state.error_dict[0].reshape(self.shape)


class _Bucket:
    """The part of DDP's GradBucket that the hook reads, for a single matrix."""

    def __init__(self, grad):
        self.flat = grad.clone().reshape(-1)
        self.shape = grad.shape

    def buffer(self):
        return self.flat

    def index(self):
        return 0

    def gradients(self):
        return [self.flat.view(self.shape)]

    def is_last(self):
        return True


def run_tensor(n, m, rank, groups, k, worst, with_hook):
    """All steps for one tensor: yields (step, M_hat, the groups' error norms)."""
    q = first_q(m, rank, k)
    many = PowerSGD(n, m, groups, q)
    one = PowerSGD(n, m, 1, q)
    mean = PowerSGD(n, m, 1, q)
    shared = PowerSGD(n, m, groups, q)
    hook = TorchHook(n, m, rank, q) if with_hook else None
    for t in range(STEPS):
        grads = [gradient(n, m, g, t, k) for g in range(groups)]
        total = sum(grads)
        m_hat = many.step(grads)

        # The basis is orthonormal and spans P's columns, which are not nearly
        # dependent for 64-bit floats.
        eye = torch.eye(rank, dtype=DTYPE)
        worst.check("P_hat^T P_hat = I", many.p_hat.T @ many.p_hat, eye)
        base, _ = torch.linalg.qr(many.p)
        worst.check("P_hat spans P", many.p_hat @ many.p_hat.T, base @ base.T)
        assert many.share > 1e-4, f"nearly dependent columns: {many.share:.3e}"
        worst.share = min(worst.share, many.share)

        # What is not sent is kept: the errors sum to the input less the output.
        worst.check(
            "sum E_g = sum M_g - M_hat", sum(many.errors), sum(many.inputs) - m_hat
        )

        # One group with the summed gradient sends the same thing, and keeps the
        # sum of the errors.
        worst.check("one group, summed gradient", one.step([total]), m_hat)
        worst.check("one group, summed error", one.errors[0], sum(many.errors))

        # The same with the gradients averaged, as in the paper: 1/G times it all.
        worst.check(
            "averaged gradient, times G", groups * mean.step([total / groups]), m_hat
        )

        # PyTorch's hook with several workers keeps another error in each: its own
        # input less the average of the outputs. The errors' sum is the same, so
        # the output is too; only each group's own error differs from E_g here.
        output = shared.step(grads)
        shared.errors = [mat - output / groups for mat in shared.inputs]
        worst.check("errors kept as PyTorch does, output", output, m_hat)
        worst.check(
            "errors kept as PyTorch does, sum", sum(shared.errors), sum(many.errors)
        )

        # PyTorch's own code, run on the summed gradient.
        if hook is not None:
            worst.check("PyTorch's powerSGD_hook, output", hook.step(total), m_hat)
            worst.check("PyTorch's powerSGD_hook, error", hook.error(), sum(many.errors))

        norms = [torch.linalg.matrix_norm(e).item() for e in many.errors]
        yield t, m_hat, norms


def rounded(value):
    """A float with 9 significant digits."""
    return float(f"{value:.9g}")


def run_case(shapes, rank, groups, worst, with_hook):
    steps = {t: {"step": t, "sums": [], "error_norms": []} for t in KEPT_STEPS}
    for k, (n, m) in enumerate(shapes):
        for t, m_hat, norms in run_tensor(n, m, rank, groups, k, worst, with_hook):
            if t in steps:
                values = m_hat.reshape(-1).tolist()
                steps[t]["sums"].append([rounded(v) for v in values])
                steps[t]["error_norms"].append([rounded(v) for v in norms])
    return {
        "shapes": [list(shape) for shape in shapes],
        "rank": rank,
        "groups": groups,
        "steps": [steps[t] for t in KEPT_STEPS],
    }


def check_formulas():
    """The vectorised data formulas against the plain ones, entry by entry."""
    for n, m, g, t, k in ((7, 5, 0, 0, 0), (4, 9, 2, 19, 1)):
        mat = gradient(n, m, g, t, k)
        q = first_q(m, 4, k)
        for i in range(n):
            for j in range(m):
                want = math.sin(
                    0.7 * (i + 1) + 1.3 * (j + 1) + 2.1 * g + 0.9 * k
                ) * math.cos(0.37 * t + 0.11 * (i + 1) * (j + 1)) + 0.25 * math.sin(
                    3.1 * (i + 1) * (g + 1) - 0.5 * (j + 1) + t
                )
                assert abs(mat[i, j].item() - want) < 1e-12
        for j in range(m):
            for c in range(4):
                want = math.cos(1.7 * (j + 1) + 0.6 * (c + 1) + 0.3 * k)
                want += 0.5 * math.sin(2.9 * (j + 1) * (c + 1))
                assert abs(q[j, c].item() - want) < 1e-12


def main():
    torch.set_num_threads(1)
    check_formulas()
    worst = Worst()
    with_hook = TorchHook.available()
    if with_hook:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    cases = [run_case(**case, worst=worst, with_hook=with_hook) for case in CASES]
    if with_hook:
        torch.distributed.destroy_process_group()
    else:
        print("PyTorch was built without gloo: powerSGD_hook was not compared")
    text = json.dumps({"cases": cases}, separators=(",", ":"), allow_nan=False) + "\n"
    assert len(text) < 200_000
    OUT.write_text(text)
    print("Largest differences:")
    for name, value in worst.seen.items():
        print(f"  {name}: {value:.2e}")
    print(f"Smallest share of a column left by Gram-Schmidt: {worst.share:.2e}")
    print(f"{OUT}: {len(text)} bytes")


if __name__ == "__main__":
    main()
