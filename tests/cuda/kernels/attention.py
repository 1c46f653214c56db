"""Checks of attention and cross_entropy.cu: see check.py.

The oracles are dense, in float64, and written from the definitions: a matrix says which query sees which key,
gradients follow the closed formulas.
"""

import dataclasses
import itertools
import math

import numpy as np

# Relative errors of all of an output: products are rounded to elements on their way.
OFF_TOTAL = {32: 1e-5, 16: 1e-2, 15: 2e-3}
# And of one, of the largest magnitude (at least 1), beyond its own rounding.
OFF_EACH = {32: 1e-5, 16: 1e-2, 15: 2e-3}


@dataclasses.dataclass
class Case:
    """Sizes of one attention, without a past. Oracles are padded; kernels get the rows of tokens alone."""

    sequences: int
    positions: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool = True
    window: int = 0
    probability: float = 0.0
    every: tuple = ()  # lengths of documents, again and again
    shorter: int = 3  # positions that each sequence has less than the one before
    stretch: int = 0  # positions of a stretch; 0: all at once alone
    spread: float = 1.0  # of queries and keys: how far scores are apart

    def lengths(self):
        return [self.positions - b * self.shorter % self.positions for b in range(self.sequences)]

    def starts(self):
        return np.cumsum([0, *self.lengths()])

    def rows_of(self, x):
        """(R, …) of (B, T, …): without padding."""
        return np.concatenate([x[b, :length] for b, length in enumerate(self.lengths())])

    def statistics_of(self, x):
        """(R H) of (B, H, T): sequence by sequence, and there head by head."""
        return np.concatenate([x[b, :, :length].ravel() for b, length in enumerate(self.lengths())])

    def documents(self):
        """From and to of each position's document, (B, T, 2), or None."""
        if not self.every:
            return None
        documents = np.zeros((self.sequences, self.positions, 2), np.uint32)
        for of_sequence, length in zip(documents, self.lengths()):
            at = 0
            for size in itertools.cycle(self.every):
                to = min(length, at + size)
                of_sequence[at:], at = (at, to), to
                if at == length:
                    break
        return documents

    def seen(self):
        """(B, queries, keys)."""
        query, key = np.arange(self.positions)[:, None], np.arange(self.positions)
        seen = key < np.array(self.lengths())[:, None, None]
        if self.causal:
            seen = seen & (key <= query)
        if self.window:
            seen = seen & (key > query - self.window) & (key < query + self.window)
        if self.every:
            documents = self.documents()
            seen = seen & (documents[:, :, :1] <= key) & (key < documents[:, :, 1:])
        return np.broadcast_to(seen, (self.sequences, self.positions, self.positions))

    def shares(self):
        """Into how many shares the heads of a group are split, beside 1."""
        group = self.heads // self.kv_heads
        return [shares for shares in range(2, group + 1) if group % shares == 0]

    def dropout(self, device, sequence=0, position=0):
        return device.Dropout.of(self.probability, first_sequence=4 + sequence, first_position=position)

    def factors(self, device):
        """Of dropout, (B, H, queries, keys)."""
        shape = self.sequences, self.heads, self.positions, self.positions
        sequence, head, query, key = np.indices(shape, sparse=True)
        return np.broadcast_to(self.dropout(device).factors(sequence, head << 20 | query, key), shape)

    def size(self, device, sequences, rows, past=0, dropout=None, first_kept=0):
        sizes = sequences, rows, self.heads, self.kv_heads, self.head_size
        masks = int(self.causal), self.window, dropout or self.dropout(device)
        return device.Attention.of(*sizes, past, *masks, first_kept)


def oracle(case, factors, qkv, dy):
    """y, lse, and gradients of queries, keys and values: all (B, heads, T, D), but lse (B, H, T)."""
    h, group = case.heads, case.heads // case.kv_heads
    heads = qkv.reshape(case.sequences, case.positions, -1, case.head_size).swapaxes(1, 2)
    q, k, v = np.split(heads, [h, h + case.kv_heads], 1)
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    dy = dy.reshape(case.sequences, case.positions, h, -1).swapaxes(1, 2)
    turned = lambda x: x.swapaxes(2, 3)
    scale, seen = 1 / math.sqrt(case.head_size), case.seen()[:, None]

    scores = np.where(seen, scale * q @ turned(k), -np.inf)
    some = np.broadcast_to(seen.any(3, keepdims=True), (*scores.shape[:3], 1))
    weights = np.exp(scores - np.where(some, scores.max(3, keepdims=True), 0))
    total = weights.sum(3, keepdims=True)
    p = weights / np.where(some, total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(some, scores.max(3, keepdims=True) + np.log(total), np.inf)[..., 0]
    dp = factors * (dy @ turned(v))
    ds = scale * p * (dp - (p * dp).sum(3, keepdims=True))
    gather = lambda x: x.reshape(case.sequences, case.kv_heads, group, case.positions, -1).sum(2)
    return (p * factors) @ v, lse, ds @ k, gather(turned(ds) @ q), gather(turned(p * factors) @ dy)


def expect(device, buffer, expected, tolerance=None):
    """All of an output, and each of it."""
    device.expect(buffer, expected, tolerance or OFF_EACH[device.element])
    norm = np.linalg.norm(expected)
    off = np.linalg.norm(buffer.wide - expected) / max(norm, 1e-2 * math.sqrt(expected.size))
    assert off <= OFF_TOTAL[device.element], f"{device.kernel}: {off:.1e} off"


def expect_sum(device, parts, expected):
    """Gradients whose sum over shares is expected."""
    device.outputs.append(parts)
    expect(device, device.floats(parts.bits.sum(0)), expected, OFF_EACH[device.element])


def rows(*heads):
    """Heads of all positions side by side: (B, T, heads D), from (B, heads, T, D)."""
    joined = np.concatenate(heads, 1).swapaxes(1, 2)
    return joined.reshape(*joined.shape[:2], -1)


def names(device, case, way):
    """The three passes: the plain ones, those for wide heads, or those of the smallest padded head size; of these, there
    are others for 64 KiB of shared memory."""
    by_size = lambda: f"_{min(size for size in (32, 64, 128, 256) if size >= case.head_size)}"
    padded = {"plain": "", "wide": "_wide"}[way] if way in ("plain", "wide") else by_size()
    passes = [f"{name}{padded}" for name in ("attention", "attention_backward_keys", "attention_backward_queries")]
    has_other = lambda name: way == "64k" and f"{name}_64k" in device.launches
    return [f"{name}_64k" if has_other(name) else name for name in passes]


def check_attention(device, random, way, **sizes):
    """All at once, and in stretches from the end, with keys and values apart."""
    if device.element not in {"plain": (32,), "wide": (32, 16, 15), "cores": (16, 15), "64k": (15,)}[way]:
        return  # there are tensor cores for elements of 16 bits, and none for floats
    case = Case(**sizes)
    b, t, width = case.sequences, case.positions, case.heads * case.head_size
    forward, backward_keys, backward_queries = names(device, case, way)
    r = int(case.starts()[-1])
    size = case.size(device, b, r)
    spread = np.full(size.packed, case.spread)
    spread[width + case.kv_heads * case.head_size :] = 1
    padded_qkv = device.elements(spread * random.uniform(-1, 1, (b, t, size.packed))).wide
    is_token = np.arange(t)[None, :, None] < np.array(case.lengths())[:, None, None]
    padded_dy = is_token * device.elements(random.uniform(-1, 1, (b, t, width))).wide
    qkv, dy = device.elements(case.rows_of(padded_qkv)), device.elements(case.rows_of(padded_dy))
    documents = case.documents()
    of_keys = [device.integers(case.starts()), None]
    if documents is not None:
        of_keys[1] = device.integers(case.rows_of(documents), np.uint32)
    expected_y, expected_lse, dq, dk, dv = oracle(case, case.factors(device), padded_qkv, padded_dy)

    y, lse = device.out(r, width), device.floats_out(r * case.heads)
    device.launch(forward, y, lse, qkv, None, *of_keys, size)
    expect(device, y, case.rows_of(rows(expected_y)))
    device.expect(lse, case.statistics_of(expected_lse), 1e-5)

    delta, dqkv = device.floats_out(r * case.heads), device.out(r, size.packed)
    device.launch("attention_delta", delta, y, dy, of_keys[0], size)
    products = (y.wide * dy.wide).reshape(r, case.heads, -1).sum(2)
    of_each = [products[start:end].T.ravel() for start, end in itertools.pairwise(case.starts())]
    device.expect(delta, np.concatenate(of_each), 1e-6)
    inputs = [dy, lse, delta, qkv, None, *of_keys, size]
    device.launch(backward_keys, dqkv, None, *inputs, 0, 1)
    assert np.isnan(dqkv.wide[:, :width]).all(), "gradients of queries are not for this pass"
    dkv = device.elements(dqkv.wide[:, width:])
    expect(device, dkv, case.rows_of(rows(dk, dv)))
    for shares in case.shares():
        parts = device.floats_out(shares, r, size.packed - width)
        device.launch(backward_keys, None, parts, *inputs, 0, shares)
        expect_sum(device, parts, case.rows_of(rows(dk, dv)))
    device.launch(backward_queries, dqkv, *inputs)
    expect(device, device.elements(dqkv.wide[:, :width]), case.rows_of(rows(dq)))
    device.same(device.elements(dqkv.wide[:, width:]), dkv.bits)
    if case.stretch:
        inputs = [padded_qkv, padded_dy, documents]
        check_stretches(device, case, way, inputs, [y, lse], rows(dq), rows(dk, dv))


def check_stretches(device, case, way, inputs, outputs, expected_dq, expected_dkv):
    """A stretch at a time: forward, the same bits as all at once."""
    (qkv, dy, documents), width = inputs, case.heads * case.head_size
    forward, backward_keys, backward_queries = names(device, case, way)
    for sequence, length in enumerate(case.lengths()):
        first = case.starts()[sequence]
        all_lse = outputs[1].bits[first * case.heads :][: length * case.heads].reshape(case.heads, length)
        # Gradients of keys and values, to which each stretch adds.
        so_far = np.full((length, expected_dkv.shape[2]), np.nan, np.float32)
        for start in reversed(range(0, length, case.stretch)):
            end = min(start + case.stretch, length)
            dropout = case.dropout(device, sequence, start)
            size = case.size(device, 1, end - start, start, dropout)
            few, few_dy = [device.elements(x[sequence, start:end]) for x in (qkv, dy)]
            kv = device.elements(qkv[sequence, :end, width:])
            of_keys = [None, None]
            if documents is not None:
                of_keys[1] = device.integers(documents[sequence, :end], np.uint32)
            y, dq = device.out(end - start, width), device.out(end - start, size.packed)
            lse, delta = (device.floats_out(case.heads, end - start) for _ in range(2))
            device.launch(forward, y, lse, few, kv, *of_keys, size)
            device.same(y, outputs[0].bits[first + start : first + end])
            device.same(lse, all_lse[:, start:end])
            device.launch("attention_delta", delta, y, few_dy, None, size)
            before, dkv = so_far[:end].copy(), device.floats(so_far[:end], changes=True)
            inputs = [few_dy, lse, delta, few, kv, *of_keys, size]
            device.launch(backward_keys, None, dkv, *inputs, int(end < length), 1)
            for shares in case.shares():
                parts = device.floats_out(shares, end, so_far.shape[1])
                device.launch(backward_keys, None, parts, *inputs, 0, shares)
                expect_sum(device, parts, dkv.wide - (so_far[:end] if end < length else 0))
            so_far[:end] = dkv.bits
            device.launch(backward_queries, dq, *inputs)
            assert np.isnan(dq.wide[:, width:]).all(), "keys and values are apart"
            expect(device, device.elements(dq.wide[:, :width]), expected_dq[sequence, start:end])
            kept = max(start + 1 - case.window, 0) // 128 * 128 if case.window else 0
            if kept:
                size = case.size(device, 1, end - start, start, dropout, kept)
                inputs = [few, few_dy, kv, of_keys, size, before, end < length]
                check_kept(device, case, way, inputs, [y, lse, delta, dq, dkv])
        expected = expected_dkv[sequence, :length]
        expect(device, device.floats(so_far), expected, OFF_EACH[device.element])


def check_kept(device, case, way, inputs, outputs):
    """A stretch without the keys and values behind its window: the same bits."""
    (few, dy, kv, of_keys, size, before, has_sum), (y, lse, delta, dq, dkv) = inputs, outputs
    forward, backward_keys, backward_queries = names(device, case, way)
    first = size.first_kept
    behind = lambda buffer: device.Before(buffer, first)
    kept = device.elements(kv.wide[first:])
    there = device.out(*y.bits.shape), device.floats_out(*lse.bits.shape)
    device.launch(forward, *there, few, behind(kept), *of_keys, size)
    device.same(there[0], y.bits)
    device.same(there[1], lse.bits)
    inputs = [dy, lse, delta, few, behind(kept), *of_keys, size]
    of_kept = device.floats(before[first:], changes=True)
    device.launch(backward_keys, None, behind(of_kept), *inputs, int(has_sum), 1)
    device.same(of_kept, dkv.bits[first:])
    for shares in case.shares():
        parts = device.floats_out(shares, *of_kept.bits.shape)
        device.launch(backward_keys, None, behind(parts), *inputs, 0, shares)
        expect_sum(device, parts, dkv.wide[first:] - (before[first:] if has_sum else 0))
    of_queries = device.out(*dq.bits.shape)
    device.launch(backward_queries, of_queries, *inputs)
    device.same(of_queries, dq.bits)


def check_scores(device, random, count, vocabulary, tile, has_bias, smoothing=0.0, scale=0.37):
    """A vocabulary in tiles, of which the last may be smaller. Three rows are not asked for, and one that is there
    is none."""
    logits = device.floats(10 * random.uniform(-1, 1, (count, vocabulary))).wide
    bias = device.elements(random.uniform(-1, 1, vocabulary)).wide * has_bias
    labels = np.where(random.random(count) < 0.3, -100, random.integers(0, vocabulary, count)).astype(np.int32)
    labelled = labels >= 0
    whole = logits + bias
    lse = np.log(np.exp(whole - whole.max(1, keepdims=True)).sum(1)) + whole.max(1)
    asked = np.sort(random.permutation(count)[: max(count - 3, 1)])
    places = np.append(asked, -1).astype(np.int32)
    counted = labelled & np.isin(np.arange(count), asked)
    begun = np.zeros((count, 4), np.float32)
    begun[:, 0], begun[:, 3] = -np.inf, labels.view(np.float32)
    out = device.floats(begun, changes=True)
    tiles = []
    for first in range(0, vocabulary, tile):
        part = slice(first, min(first + tile, vocabulary))
        width = part.stop - first
        stride = -(-width // 8) * 8
        of_tile = device.floats(np.pad(logits[places][:, part], [(0, 0), (0, stride - width)]))
        tiles.append((of_tile, device.elements(bias[part]) if has_bias else None, first))
        sizes = (len(places), width, stride, first, 1 - smoothing, smoothing / vocabulary)
        device.launch("score_rows", out, *tiles[-1][:2], device.integers(places), *sizes)
    assert out.bits[:, 3].tobytes() == labels.tobytes(), "labels changed"
    assert (out.bits[~counted, :3] == begun[~counted, :3]).all(), "other positions stay"
    found = np.stack([out.wide[:, 0] + np.log(np.maximum(out.wide[:, 1], 1e-30)), out.wide[:, 2]], 1)
    of_target = (1 - smoothing) * whole[np.arange(count), labels % vocabulary] + smoothing * whole.mean(1)
    expected = np.stack([lse, of_target], 1)
    device.expect(device.floats(found[counted]), expected[counted], 1e-6)

    statistics = device.floats(out.bits)
    of_each = (1 - smoothing) * (np.arange(vocabulary) == labels[:, None]) + smoothing / vocabulary
    slopes = scale * (np.exp(whole - lse[:, None]) - of_each)
    slopes = np.where(labelled[:, None], slopes, 0)[places]
    slopes[-1] = 0
    for logits, bias, first in tiles:
        d, width = device.out(*logits.bits.shape), min(tile, vocabulary - first)
        places_there = device.integers(places)
        sizes = (len(places), width, logits.bits.shape[1], first)
        factors = (scale, 1 - smoothing, smoothing / vocabulary)
        device.launch("score_gradient", d, statistics, logits, bias, places_there, *sizes, *factors, 0)
        assert np.isnan(d.wide[:, width:]).all(), "what is between rows stays"
        device.expect(device.elements(d.wide[:, :width]), slopes[:, first : first + width], 2e-6)
        if smoothing == 0:  # each row has a weight, where the target's logit was
            of_rows = np.where(labelled, 0.25 * (np.arange(count) % 9 - 4), np.nan).astype(np.float32)
            weighed = device.floats(np.column_stack([out.bits[:, :2], of_rows, out.bits[:, 3]]))
            d = device.out(*logits.bits.shape)
            device.launch("score_gradient", d, weighed, logits, bias, places_there, *sizes, *factors, 1)
            of_rows = np.where(labelled, of_rows, 0)[places]
            device.expect(device.elements(d.wide[:, :width]), of_rows[:, None] * slopes[:, first : first + width], 2e-6)


def check_form(device, random, rows, columns, scale, cap):
    """Logits that are scaled and limited, and the gradient of the products that they are made of."""
    stride = -(-columns // 8) * 8
    x = device.floats(np.pad(10 * random.uniform(-1, 1, (rows, columns)), [(0, 0), (0, stride - columns)]), changes=True)
    scaled = scale * x.wide[:, :columns]
    expected, slope = scaled, np.full_like(scaled, scale)
    if cap:
        expected = cap * np.tanh(scaled / cap)
        slope = scale * (1 - np.tanh(scaled / cap) ** 2)
    device.launch("form_logits", x, rows, columns, stride, scale, cap)
    assert (x.wide[:, columns:] == 0).all(), "what is between rows stays"
    device.expect(device.floats(x.wide[:, :columns]), expected, 1e-6)
    logits = device.floats(x.bits)
    d = device.elements(random.uniform(-1, 1, (rows, stride)), changes=True)
    expected = np.concatenate([d.wide[:, :columns] * slope, d.wide[:, columns:]], 1)
    device.launch("form_gradient", d, logits, rows, columns, stride, scale, cap)
    device.expect(d, expected, 2e-6)


def checks():
    def case(b, t, h, k, d, **more):
        return dict(sequences=b, positions=t, heads=h, kv_heads=k, head_size=d, **more)

    documents = (70, 3, 64, 1)
    # Accesses are looked at in every fourth: each padded head size is among them.
    cases = [
        case(1, 1, 1, 1, 1, stretch=1),
        case(1, 1, 2, 1, 256, causal=False, probability=0.5),
        case(3, 5, 4, 2, 5, window=3, probability=0.2, stretch=2),
        case(2, 5, 3, 1, 1, causal=False),
        case(2, 67, 2, 1, 13, window=3, probability=0.2, stretch=64),
        case(2, 67, 2, 1, 13, causal=False, window=1, shorter=20),
        case(2, 67, 4, 2, 32, causal=False, spread=6.0),
        case(2, 130, 2, 2, 64, window=1, stretch=64),
        case(2, 130, 3, 1, 64, probability=0.1, stretch=64, spread=4.0),
        case(1, 130, 2, 1, 72, causal=False, probability=0.2),
        case(2, 200, 1, 1, 5, causal=False, window=65, shorter=30),
        case(2, 150, 1, 1, 48, window=20, every=(70, 30), stretch=64),
        case(1, 200, 4, 2, 128, window=65, every=documents, stretch=128, spread=3.0),
        case(1, 200, 1, 1, 128, causal=False, probability=0.2, every=documents),
        case(2, 200, 1, 1, 64, causal=False, every=documents, shorter=77),
        case(2, 200, 3, 1, 16, causal=False, window=3, probability=0.1, shorter=77),
        case(2, 130, 2, 1, 256, window=65, probability=0.2, stretch=64),
        case(2, 300, 1, 1, 64, shorter=200, stretch=64),  # whole tiles less
        case(1, 67, 1, 1, 130, causal=False, spread=3.0),
        case(2, 67, 4, 1, 24, probability=0.1, stretch=64),
        case(2, 400, 2, 1, 64, window=40, every=(70, 30), probability=0.1, shorter=70, stretch=128),
        case(1, 300, 4, 2, 128, window=20, stretch=64),
        case(1, 200, 1, 1, 256, window=65, stretch=64),
    ]
    wide = [
        case(1, 1, 2, 1, 257, causal=False, probability=0.5),
        case(3, 5, 4, 2, 300, window=3, probability=0.2, stretch=2),
        case(2, 67, 3, 1, 320, every=documents, causal=False, spread=3.0),
        case(1, 130, 2, 1, 512, window=65, probability=0.2, stretch=64),
    ]
    scores = [(1, 1, 1), (3, 7, 7), (6, 11, 3), (40, 20, 8), (5, 1030, 1030), (4, 5003, 2048)]
    return [
        ("attention", check_attention, [one | dict(way="plain") for one in cases]),
        ("attention", check_attention, [one | dict(way="wide") for one in wide]),
        ("attention", check_attention, [one | dict(way="cores") for one in cases]),
        ("attention", check_attention, [one | dict(way="64k") for one in cases if one["head_size"] > 64]),
        ("attention_sm_70", check_attention, [one | dict(way="64k") for one in cases]),
        (
            "cross_entropy",
            check_scores,
            [dict(count=n, vocabulary=v, tile=t, has_bias=bias) for n, v, t in scores for bias in (False, True)]
            + [dict(count=n, vocabulary=v, tile=t, has_bias=True, smoothing=0.1) for n, v, t in scores[2:]],
        ),
        (
            "cross_entropy",
            check_form,
            [dict(rows=r, columns=c, scale=s, cap=cap) for r, c in [(1, 1), (3, 30), (5, 1030)]
             for s, cap in [(0.25, 0.0), (1.0, 3.0)]],
        ),
    ]
