"""Checks of linear attention and of gates of attention's output: see check.py.

The oracles go position by position, in float64, as the definitions have it.
"""

import dataclasses
import itertools

import numpy as np

# Positions of a piece, and of one run of the forward that notes states.
PIECE = 32


@dataclasses.dataclass
class Case:
    """Sizes, lengths of sequences, positions before each, and lengths of documents, again and again."""

    lengths: tuple
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int = 4
    pasts: tuple = ()
    every: tuple = ()
    past: int = 0  # of a chunk: positions before it

    def __post_init__(self):
        self.keys, self.values = self.key_heads * self.key_size, self.value_heads * self.value_size
        self.mixed = 2 * self.keys + self.values
        self.remembered = self.mixed + 2 * self.value_heads
        self.projected = self.remembered + self.values
        self.inputs, self.states = (self.taps - 1) * self.mixed, self.values * self.key_size
        self.carried = self.inputs + self.states
        self.rows, self.sequences, self.longest = sum(self.lengths), len(self.lengths), max(self.lengths)
        self.starts = np.cumsum([0, *self.lengths])
        self.name = "128" if self.key_size <= 128 else "1024"

    def before(self, sequence):
        return self.pasts[sequence] if self.pasts else self.past

    def documents(self):
        """From and to of each position, from the first of the first sequence on; or None."""
        if not self.every:
            return None
        found = []
        for length in self.lengths:
            at, end = 0, self.past + length
            for size in itertools.cycle(self.every):
                to = min(end, at + size)
                found += [(at, to)] * (to - at)
                at = to
                if at == end:
                    break
        return np.array(found)

    def places(self):
        """For each row: sequence, index in it, rows of its document before it and behind it."""
        documents, found = self.documents(), []
        for sequence, length in enumerate(self.lengths):
            for at in range(length):
                row = self.starts[sequence] + at
                begin, end = (0, 1 << 30) if documents is None else documents[self.past + row]
                position = self.before(sequence) + at
                found.append((sequence, at, position - begin, end - 1 - position))
        return found

    def of(self, device):
        """Starts, documents, positions before, and the sizes."""
        is_chunk = self.past > 0
        starts = None if is_chunk else device.integers(self.starts)
        documents = self.documents()
        documents = None if documents is None else device.integers(documents, np.uint32)
        pasts = device.integers(self.pasts) if self.pasts else None
        past = self.pasts[0] if self.pasts else self.past
        heads = self.key_heads, self.value_heads, self.key_size, self.value_size, self.taps
        return starts, documents, pasts, device.Linear(self.sequences, self.rows, past, *heads)


def noise(random, *shape):
    return random.uniform(-1, 1, shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def slope_of_silu(x):
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


def check_convolution(device, random, has_left=True, **sizes):
    case = Case(**sizes)
    starts, documents, pasts, size = case.of(device)
    projected = device.elements(noise(random, case.rows, case.projected))
    w = device.elements(noise(random, case.mixed, case.taps))
    dy = device.elements(noise(random, case.rows, case.mixed))
    has_left |= case.past > 0 or bool(case.pasts)
    left = device.floats(noise(random, case.sequences, case.carried)) if has_left else None
    x = projected.wide[:, : case.mixed]
    of_left = left.wide[:, : case.inputs].reshape(case.sequences, case.taps - 1, case.mixed) if has_left else None

    def input_at(sequence, at):
        return x[case.starts[sequence] + at] if at >= 0 else of_left[sequence, case.taps - 1 + at]

    sums = np.zeros((case.rows, case.mixed))
    for row, (sequence, at, before, _) in enumerate(case.places()):
        for back in range(min(case.taps - 1, before) + 1):
            sums[row] += w.wide[:, case.taps - 1 - back] * input_at(sequence, at - back)
    y = device.out(case.rows, case.mixed)
    device.launch("short_convolution", y, projected, w, left, starts, documents, pasts, case.mixed, size)
    device.expect(y, silu(sums), 2e-6)

    def outside(before, edge):
        """Rows outside of sequences: a part of (B, S)."""
        expected = before.copy()
        for sequence, length in enumerate(case.lengths):
            for nth in range(case.taps - 1):
                to = slice(nth * case.mixed, (nth + 1) * case.mixed)
                expected[sequence, to] = edge(sequence, length, nth)
        return expected

    def last_input(sequence, length, nth):
        at = length - (case.taps - 1) + nth
        is_there = at >= 0 or (has_left and case.before(sequence) > 0)
        return input_at(sequence, at) if is_there else 0

    behind = device.floats(noise(random, case.sequences, case.carried), changes=True)
    expected = outside(behind.wide, last_input)
    if case.taps > 1:
        device.launch("leave_inputs", behind, projected, left, starts, pasts, case.mixed, size)
        device.expect(behind, expected, 0)

    dsums = dy.wide * slope_of_silu(sums)
    of_behind = device.floats(noise(random, case.sequences, case.carried)) if has_left else None

    def gradient_of(sequence, at):
        outside = at - case.lengths[sequence]
        if outside < 0:
            return dsums[case.starts[sequence] + at]
        if of_behind is None:
            return 0
        return of_behind.wide[sequence, outside * case.mixed : (outside + 1) * case.mixed]

    dprojected = device.elements(noise(random, case.rows, case.projected), changes=True)
    dx, dw = dprojected.wide.copy(), np.zeros((case.rows, case.mixed, case.taps))
    for row, (sequence, at, before, behind_it) in enumerate(case.places()):
        ahead = range(min(case.taps - 1, behind_it) + 1)
        dx[row, : case.mixed] = sum(w.wide[:, case.taps - 1 - n] * gradient_of(sequence, at + n) for n in ahead)
        for back in range(min(case.taps - 1, before) + 1):
            dw[row, :, case.taps - 1 - back] = dsums[row] * input_at(sequence, at - back)
    edges = [left, of_behind, starts, documents, pasts]
    device.launch("short_convolution_backward", dprojected, dy, projected, w, *edges, case.mixed, size)
    device.expect(dprojected, dx, 5e-6)
    for chunk in (3, 64):
        parts = device.floats_out(-(-case.rows // chunk), case.mixed, case.taps)
        of = [parts, dy, projected, w, left, starts, documents, pasts]
        device.launch("short_convolution_parts", *of, chunk, case.mixed, size)
        device.expect(parts, np.stack([dw[at : at + chunk].sum(0) for at in range(0, case.rows, chunk)]), 5e-6)
    dbefore = device.floats(noise(random, case.sequences, case.carried), changes=True)
    expected = outside(dbefore.wide, lambda sequence, _, nth: gradient_of(sequence, nth))
    if case.taps > 1:
        device.launch("leave_gradients", dbefore, dy, projected, w, *edges, case.mixed, size)
        device.expect(dbefore, expected, 5e-6)


def check_gated_norm(device, random, rows, value_heads, value_size):
    case = Case((rows,), 1, value_heads, 2, value_size)
    size, epsilon = case.of(device)[3], 1e-3
    x, dy = (device.elements(noise(random, rows, value_heads, value_size)) for _ in range(2))
    projected = device.elements(2 * noise(random, rows, case.projected))
    gamma = device.elements(noise(random, value_size))
    z = projected.wide[:, case.remembered :].reshape(x.wide.shape)
    rstd = 1 / np.sqrt((x.wide**2).mean(2, keepdims=True) + epsilon)
    n = x.wide * rstd
    y = device.out(*x.wide.shape)
    device.launch("gated_norm", y, x, projected, gamma, rows, epsilon, size)
    device.expect(y, n * gamma.wide * silu(z), 5e-6)
    dprojected, dx = device.elements(noise(random, rows, case.projected), changes=True), device.out(*x.wide.shape)
    expected, g = dprojected.wide.copy(), dy.wide * silu(z) * gamma.wide
    expected[:, case.remembered :] = (dy.wide * n * gamma.wide * slope_of_silu(z)).reshape(rows, -1)
    device.launch("gated_norm_backward", dx, dprojected, dy, x, projected, gamma, rows, epsilon, size)
    device.expect(dx, rstd * (g - n * (g * n).mean(2, keepdims=True)), 1e-5)
    device.expect(dprojected, expected, 5e-6)
    for chunk in (2, 64):
        parts, each = device.floats_out(-(-rows // chunk), value_size), (dy.wide * silu(z) * n).sum(1)
        device.launch("gated_norm_parts", parts, dy, x, projected, rows, chunk, epsilon, size)
        device.expect(parts, np.stack([each[at : at + chunk].sum(0) for at in range(0, rows, chunk)]), 5e-6)


@dataclasses.dataclass
class Head:
    """A head of values of a sequence: what it reads, (T, ...), and the gradients that its backward finds."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def forward(self, state):
        """Outputs and errors, and the state before each position and behind the last."""
        y, errors, states = [], [], [state]
        for q, k, v, alpha, beta in zip(self.q, self.k, self.v, self.alpha, self.beta):
            error = v - alpha * state @ k
            state = alpha * state + beta * np.outer(error, k)
            y.append(state @ q)
            errors.append(error)
            states.append(state)
        return np.array(y), np.array(errors), np.array(states)

    def backward(self, dy, dstate, errors, states):
        """The gradients of q, k, delta, beta and ln alpha; and that of the state behind each position, and in front."""
        found, dstates = [], [dstate]
        for at in reversed(range(len(dy))):
            q, k, alpha, beta = self.q[at], self.k[at], self.alpha[at], self.beta[at]
            dstate = dstate + np.outer(dy[at], q)
            slope = dstate @ k
            dk = dstate.T @ (beta * errors[at]) - alpha * beta * states[at].T @ slope
            dq = states[at + 1].T @ dy[at]
            dstate = dstate - beta * np.outer(slope, k)
            found.append((dq, dk, slope, slope @ errors[at], alpha * (dstate * states[at]).sum()))
            dstate = alpha * dstate
            dstates.append(dstate)
        dstates.reverse()
        return [np.array(one) for one in zip(*found[::-1])], np.array(dstates)


def check_rule(device, random, segment=64, has_left=False, strong=1.0, **sizes):
    case = Case(**sizes)
    starts, documents, pasts, size = case.of(device)
    h, dk, dv, b = case.value_heads, case.key_size, case.value_size, case.sequences
    x, dy = device.elements(noise(random, case.rows, case.mixed)), device.elements(noise(random, case.rows, case.values))
    projected = device.elements(strong * noise(random, case.rows, case.projected))
    log, bias = (device.elements(noise(random, h)) for _ in range(2))
    has_left |= case.past > 0 or bool(case.pasts)
    carried = lambda: device.floats(noise(random, b, case.carried)) if has_left else None
    left, dbehind = carried(), carried()
    of_states = lambda buffer: None if buffer is None else device.Before(buffer, 0, case.inputs)
    state_of = lambda buffer, b: buffer.wide[b, case.inputs :].reshape(h, dv, dk)

    logits = projected.wide[:, case.mixed : case.mixed + h]
    step = projected.wide[:, case.mixed + h : case.remembered] + bias.wide
    rate, softplus, beta = np.exp(log.wide), np.log1p(np.exp(step)), sigmoid(logits)
    is_first = np.array([before == 0 for _, _, before, _ in case.places()])
    alpha = np.where(is_first[:, None], 0, np.exp(-rate * softplus))
    raw = [part.reshape(case.rows, case.key_heads, dk) for part in np.split(x.wide[:, : 2 * case.keys], 2, 1)]
    lengths = [np.sqrt((part**2).sum(2, keepdims=True) + 1e-6) for part in raw]
    q, k = raw[0] / lengths[0] / np.sqrt(dk), raw[1] / lengths[1]
    v = x.wide[:, 2 * case.keys :].reshape(case.rows, h, dv)

    zeros = np.zeros((h, dv, dk))
    heads = {}
    for sequence, head in itertools.product(range(b), range(h)):
        rows, shared = slice(*case.starts[sequence : sequence + 2]), head * case.key_heads // h
        of = Head(q[rows, shared], k[rows, shared], v[rows, head], alpha[rows, head], beta[rows, head])
        begin = state_of(left, sequence)[head] if has_left and case.before(sequence) else zeros[0]
        y, errors, states = of.forward(begin)
        end = state_of(dbehind, sequence)[head] if has_left else zeros[0]
        slopes, dstates = of.backward(dy.wide[rows].reshape(-1, h, dv)[:, head], end, errors, states)
        heads[sequence, head] = y, errors, states, slopes, dstates
    rows_of = lambda part: np.concatenate(
        [np.stack([part(*heads[sequence, head]) for head in range(h)], 1) for sequence in range(b)]
    )

    read = [x, projected, log, bias, starts, documents, pasts]
    far = [case.carried, case.carried]
    y = device.out(case.rows, h, dv)
    behind = device.floats(noise(random, b, case.carried), changes=True)
    expected = behind.wide.copy()
    for sequence in range(b):
        last = np.stack([heads[sequence, head][2][-1] for head in range(h)])
        expected[sequence, case.inputs :] = last.ravel()
    to = [y, None, None, of_states(behind), of_states(left)]
    device.launch(f"delta_rule_{case.name}", *to, *read, *far, 0, case.longest, 1, size)
    device.expect(y, rows_of(lambda y, *_: y), 5e-6)
    device.expect(behind, expected, 5e-6)

    count, of_segments = min(segment, case.longest), -(-case.longest // segment)
    noted = device.floats(np.full((of_segments, b, h, dv, dk), np.nan), changes=True)
    to = [None, None, noted, None, of_states(left)]
    device.launch(f"delta_rule_{case.name}", *to, *read, *far, 0, case.longest, segment, size)
    expected = np.full(noted.wide.shape, np.nan)
    for (sequence, head), (_, _, states, *_) in heads.items():
        for nth in range(-(-case.lengths[sequence] // segment)):
            expected[nth, sequence, head] = states[nth * segment]
    expect_known(device, noted, expected)

    tolerance = 1e-5
    carry = device.floats(noise(random, b, h, dv, dk), changes=True)
    dbefore = device.floats(noise(random, b, case.carried), changes=True)
    of_before = dbefore.wide.copy()
    dx = device.elements(noise(random, case.rows, case.mixed), changes=True)
    dprojected = device.elements(noise(random, case.rows, case.projected), changes=True)
    of_x, of_projected, pieces = dx.wide.copy(), dprojected.wide.copy(), -(-count // PIECE)
    for nth in reversed(range(of_segments)):
        from_, name = nth * segment, case.name
        known = lambda: device.floats(np.full((b, count, h, dv), np.nan), changes=True)
        of_pieces = lambda: device.floats(np.full((pieces, b, h, dv, dk), np.nan), changes=True)
        errors, slopes, states, dstates = known(), known(), of_pieces(), of_pieces()
        front = device.floats(noted.bits[nth])
        to = [None, errors, states, None, front]
        strides = [case.states, case.carried]
        device.launch(f"delta_rule_{name}", *to, *read, *strides, from_, count, PIECE, size)
        expected = {what: np.full(buffer.wide.shape, np.nan) for what, buffer in
                    dict(errors=errors, slopes=slopes, states=states, dstates=dstates).items()}
        of_heads = np.full((b, count, h, 2, dk), np.nan)
        parts = np.zeros((pieces, b, 2, h))
        before = carry.wide.copy()
        for (sequence, head), (_, e, s, (dq, dkey, slope, dbeta, dlog), ds) in heads.items():
            own = range(from_, min(from_ + count, case.lengths[sequence]))
            if not own:
                continue
            some, at = slice(own.start, own.stop), slice(0, len(own))
            expected["errors"][sequence, at, head] = e[some]
            expected["slopes"][sequence, at, head] = slope[some]
            of_heads[sequence, at, head] = np.stack([dq[some], dkey[some]], 1)
            before[sequence, head] = ds[own.start]
            if nth == 0:
                place = case.inputs + head * dv * dk
                of_before[sequence, place : place + dv * dk] = ds[0].ravel()
            row = case.starts[sequence]
            column = 2 * case.keys + head * dv
            rows = slice(row + own.start, row + own.stop)
            of_x[rows, column : column + dv] = beta[rows, head, None] * slope[some]
            dstep = -dlog[some] * rate[head] * sigmoid(step[rows, head])
            of_projected[rows, case.mixed + head] = dbeta[some] * beta[rows, head] * (1 - beta[rows, head])
            of_projected[rows, case.mixed + h + head] = dstep
            of_rate = -dlog[some] * rate[head] * softplus[rows, head]
            for piece in range(-(-len(own) // PIECE)):
                of_piece = slice(piece * PIECE, (piece + 1) * PIECE)
                expected["states"][piece, sequence, head] = s[own.start + piece * PIECE]
                expected["dstates"][piece, sequence, head] = ds[min(own.start + (piece + 1) * PIECE, own.stop)]
                parts[piece, sequence, :, head] = of_rate[of_piece].sum(), dstep[of_piece].sum()
        expect_known(device, errors, expected["errors"])
        expect_known(device, states, expected["states"])
        to = [slopes, dstates, carry, of_states(dbefore) if has_left else None, dx, dy, of_states(dbehind)]
        device.launch(f"delta_rule_back_{name}", *to, *read, case.carried, from_, count, PIECE, size)
        expect_known(device, slopes, expected["slopes"])
        expect_known(device, dstates, expected["dstates"])
        device.expect(carry, before, tolerance)
        if has_left:
            device.expect(dbefore, of_before, tolerance)
        device.expect(dx, of_x, tolerance)
        states, dstates, errors, slopes = (device.floats(one.bits) for one in (states, dstates, errors, slopes))
        sums, found = device.floats_out(pieces, b, 2, h), device.floats(of_heads * np.nan, changes=True)
        of = [found, dprojected, sums, states, dstates, errors, slopes, dy, *read]
        device.launch("delta_rule_pieces", *of, from_, count, size)
        expect_known(device, found, of_heads)
        device.expect(dprojected, of_projected, tolerance)
        device.expect(sums, parts, tolerance)

        found = device.floats(found.bits)
        for sequence, length in enumerate(case.lengths):
            own = range(from_, min(from_ + count, length))
            if not own:
                continue
            rows = slice(case.starts[sequence] + own.start, case.starts[sequence] + own.stop)
            of_keys = found.wide[sequence, : len(own)].reshape(len(own), case.key_heads, -1, 2, dk).sum(2)
            for which, scale in ((0, 1 / np.sqrt(dk)), (1, 1)):
                own_x, length_of, d = raw[which][rows], lengths[which][rows], of_keys[:, :, which]
                along = (d * own_x).sum(2, keepdims=True) / length_of**2
                columns = slice(which * case.keys, (which + 1) * case.keys)
                of_x[rows, columns] = (scale / length_of * (d - own_x * along)).reshape(len(own), -1)
        device.launch("delta_rule_rows", dx, x, found, starts, from_, count, size)
        device.expect(dx, of_x, tolerance)


def expect_known(device, buffer, expected):
    """Compares what is a number; all else must still be none."""
    is_known = ~np.isnan(expected)
    assert np.isnan(buffer.wide[~is_known]).all(), f"{device.kernel}: more is written"
    found, buffer.bits[~is_known] = buffer.bits.copy(), 0
    device.expect(buffer, np.where(is_known, expected, 0), 1e-5)
    buffer.bits[...] = found


def check_split_gates(device, random, rows, heads, kv_heads, head_size):
    size, width = device.Attention.of(1, rows, heads, kv_heads, head_size), (2 * heads + 2 * kv_heads) * head_size
    x = device.elements(noise(random, rows, width))
    pairs, kv = np.split(x.bits, [2 * heads * head_size], 1)
    pairs = pairs.reshape(rows, heads, 2, head_size)
    qkv = np.concatenate([pairs[:, :, 0].reshape(rows, -1), kv], 1)
    to, gates, y = device.out(*qkv.shape), device.out(rows, heads * head_size), device.out(rows, width)
    device.launch("split_gates", to, gates, x, width, size)
    device.same(to, qkv)
    device.same(gates, pairs[:, :, 1].reshape(rows, -1))
    device.launch("join_gates", y, to, gates, width, size)
    device.same(y, x.bits)


def check_sigmoid_gate(device, random, n):
    x, gates, dy = (device.elements(scale * noise(random, n)) for scale in (1, 4, 1))
    y, dx, dgates, share = device.out(n), device.out(n), device.out(n), sigmoid(gates.wide)
    device.launch("sigmoid_gate", y, x, gates, n)
    device.expect(y, share * x.wide, 1e-6)
    device.launch("sigmoid_gate_backward", dx, dgates, dy, x, gates, n)
    device.expect(dx, share * dy.wide, 1e-6)
    device.expect(dgates, dy.wide * x.wide * share * (1 - share), 1e-6)


def checks():
    small = dict(key_heads=2, value_heads=4, key_size=6, value_size=5)
    tall = dict(key_heads=1, value_heads=2, key_size=4, value_size=40, taps=2)
    wide = dict(key_heads=1, value_heads=1, key_size=132, value_size=9, taps=1)
    usual = dict(key_heads=1, value_heads=2, key_size=128, value_size=36)
    some, lengths = dict(lengths=(37, 9, 1)), dict(lengths=(70, 3, 64))
    behind = dict(lengths=(5, 40, 2), pasts=(3, 0, 7))
    documents = dict(lengths=(37, 70), every=(3, 7, 1, 30))
    chunk = dict(lengths=(41,), past=64)
    cut = dict(lengths=(41,), past=64, every=(30, 8, 40, 2))
    places = [some, lengths, behind, documents, chunk, cut]
    rules = [{**sizes, **place} for sizes, place in itertools.product((small, tall), places)]
    rules += [{**wide, **some}, {**wide, **cut}, {**usual, **documents}, {**usual, **chunk}]
    rules += [{**small, **lengths, "strong": 8.0}, {**small, **lengths, "segment": 256, "has_left": True}]
    convolutions = [{**sizes, **place} for sizes, place in itertools.product((small, tall, wide), places)]
    convolutions += [{**small, **some, "has_left": False}, {**small, **documents, "taps": 7, "has_left": False}]
    convolutions += [dict(key_heads=3, value_heads=3, key_size=100, value_size=151, lengths=(5, 2))]
    norms = [(1, 1, 1), (5, 3, 10), (70, 2, 128), (3, 4, 131)]
    heads = [(1, 1, 1, 1), (5, 4, 2, 6), (3, 3, 1, 131)]
    return [
        ("linear_attention", check_convolution, convolutions),
        ("linear_attention", check_gated_norm, [dict(rows=r, value_heads=h, value_size=d) for r, h, d in norms]),
        ("linear_attention", check_rule, rules),
        ("gates", check_split_gates, [dict(rows=r, heads=h, kv_heads=k, head_size=d) for r, h, k, d in heads]),
        ("gates", check_sigmoid_gate, [dict(n=n) for n in (1, 3, 1024, 1025, 5003)]),
    ]
