"""The peer's models: plain functions of tensors, so that one text serves all ways to train them."""


def part_shapes(model):
    """Shapes of the tensors of each part: the embedding, each block, the head."""
    h, i, v = model["hidden"], model["intermediate"], model["vocabulary"]
    if model["family"] == "llama":
        kv = h // model["heads"] * model["kv_heads"]
        block = [(h,), (h, h), (kv, h), (kv, h), (h, h), (h,), (i, h), (i, h), (h, i)]
        return [[(v, h)], *[block] * model["layers"], [(h,), (v, h)]]
    block = [(3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (i, h), (i,), (h, i), (h,), (h,), (h,)]
    # The head's table is the embedding's.
    head = [(h, h), (h,), (h,), (h,), (v,)]
    return [[(v, h), (512, h), (h,), (h,)], *[block] * model["layers"], head]


def initialise(torch, tensor):
    return torch.nn.init.normal_(tensor, 0, 0.02) if tensor.dim() > 1 else tensor.fill_(1)


def turn(torch, x):
    """Rotary positions."""
    half = x.shape[-1] // 2
    count = lambda n: torch.arange(n, device=x.device, dtype=torch.float32)
    angles = count(x.shape[-2])[:, None] * 500000.0 ** (-count(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def block_of(torch, model):
    F, heads, kv_heads = torch.nn.functional, model["heads"], model["kv_heads"]
    split = lambda x, n: x.view(*x.shape[:2], n, -1).transpose(1, 2)
    join = lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def llama(x, n1, q, k, v, o, n2, gate, up, down):
        y = F.rms_norm(x, n1.shape, n1, 1e-5)
        q = turn(torch, split(F.linear(y, q), heads))
        k = turn(torch, split(F.linear(y, k), kv_heads))
        k, v = (one.repeat_interleave(heads // kv_heads, 1)
                for one in (k, split(F.linear(y, v), kv_heads)))
        x = x + F.linear(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)), o)
        y = F.rms_norm(x, n2.shape, n2, 1e-5)
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    def bert(x, qkv, qkv_bias, o, o_bias, n1, n1_bias, up, up_bias, down, down_bias, n2, n2_bias):
        q, k, v = (split(one, heads) for one in F.linear(x, qkv, qkv_bias).chunk(3, -1))
        y = F.linear(join(F.scaled_dot_product_attention(q, k, v)), o, o_bias)
        x = F.layer_norm(x + y, n1.shape, n1, n1_bias)
        y = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
        return F.layer_norm(x + y, n2.shape, n2, n2_bias)

    return llama if model["family"] == "llama" else bert


def embed(torch, model, part, ids):
    F, x = torch.nn.functional, torch.nn.functional.embedding(ids, part[0])
    if model["family"] == "llama":
        return x
    return F.layer_norm(x + part[1][:ids.shape[1]], part[2].shape, part[2], part[3])


def loss_of(torch, model, part, table, x, ids, count):
    """Llama's loss is of the next tokens, BERT's of 15 in 100 positions; the others meet no head.
    `count` is the number of sequences of a step, each of which has as many targets."""
    F = torch.nn.functional
    if model["family"] == "llama":
        y, targets = F.rms_norm(x[:, :-1], part[0].shape, part[0], 1e-5), ids[:, 1:]
        logits = F.linear(y, part[1])
    else:
        some = max(1, int(0.15 * ids.shape[1]))
        y, targets = F.gelu(F.linear(x[:, :some], part[0], part[1])), ids[:, :some]
        logits = F.linear(F.layer_norm(y, part[2].shape, part[2], part[3]), table, part[4])
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total / (targets.shape[1] * count)
