"""Ten AdamW steps of a Llama and of a GPT-2 whose blocks torch.distributed cuts over processes, in f64.

Each process has some heads and some channels of the feed-forward: ColwiseParallel cuts the products
before attention and before the activation function, RowwiseParallel those behind. Makes slices.json (losses
and gradient norms with 2 and with 4 processes) and, for the Llama, a directory sliced-llama as families.py
does. The GPT-2 is that of `tied`, which gpt2.py makes, with queries, keys and values as linear layers.

    pip install torch transformers && python slices.py
"""

import json
import os
import pathlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig

HERE = pathlib.Path(__file__).parent
STEPS, BATCH, RATE, DECAY, VOCABULARY = 10, 4, 3e-3, 0.1, 61
LLAMA = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
                    num_attention_heads=8, num_key_value_heads=4, head_dim=6, max_position_embeddings=40,
                    initializer_range=0.2, tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
                    bos_token_id=None, eos_token_id=None, pad_token_id=None)
CUT = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel,
       "gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}


class Block(nn.Module):
    """A block of GPT-2, with the weights of a block of transformers."""

    def __init__(self, block, heads):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = block.ln_1, block.ln_2, heads
        fused = zip(block.attn.c_attn.weight.chunk(3, 1), block.attn.c_attn.bias.chunk(3))
        self.q_proj, self.k_proj, self.v_proj = [self.linear(*one) for one in fused]
        self.o_proj = self.linear(block.attn.c_proj.weight, block.attn.c_proj.bias)
        self.up_proj = self.linear(block.mlp.c_fc.weight, block.mlp.c_fc.bias)
        self.down_proj = self.linear(block.mlp.c_proj.weight, block.mlp.c_proj.bias)

    @staticmethod
    def linear(weight, bias):
        linear = nn.Linear(*weight.shape)
        linear.weight, linear.bias = nn.Parameter(weight.detach().T.contiguous()), nn.Parameter(bias.detach().clone())
        return linear

    def forward(self, x):
        n = self.ln_1(x)
        heads = lambda y: y.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(
            heads(self.q_proj(n)), heads(self.k_proj(n)), heads(self.v_proj(n)), is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2, with the weights of one of transformers."""

    def __init__(self, model):
        super().__init__()
        of = model.transformer
        self.wte, self.wpe, self.ln_f = of.wte, of.wpe, of.ln_f
        self.blocks = nn.ModuleList(Block(block, model.config.n_head) for block in of.h)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def logits_of(model, ids):
    found = model(ids)
    return found if isinstance(found, torch.Tensor) else found.logits


def loss_of(model, batch):
    """The mean over all labelled positions; sequences one by one, so that none is padded."""
    losses, count = 0.0, 0
    for line in batch:
        logits = logits_of(model, torch.tensor([line["input_ids"]]))[0, :-1]
        labels = torch.tensor(line.get("labels", line["input_ids"])[1:], dtype=torch.int64)
        losses = losses + nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return losses / count


def train(model, lines, golden):
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == is_matrix], "weight_decay": decay}
              for is_matrix, decay in [(True, golden["weight_decay"]), (False, 0.0)]]
    optimizer = torch.optim.AdamW(groups, lr=golden["learning_rate"], foreach=False)
    losses, norms = [], []
    for step in range(golden["steps"]):
        loss = loss_of(model, lines[step * golden["batch"]:(step + 1) * golden["batch"]])
        optimizer.zero_grad()
        loss.backward()
        whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        norms.append(float(sum((gradient ** 2).sum() for gradient in whole).sqrt()))
        if golden["clip_norm"]:
            factor = min(1.0, golden["clip_norm"] / (norms[-1] + 1e-6))
            for parameter in parameters:
                parameter.grad.mul_(factor)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


def work(rank, processes, name, golden, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    model = AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="eager")
    model = (Gpt2(model) if name == "tied" else model).to(torch.float64)
    plan = {path: CUT[path.rsplit(".", 1)[-1]]() for path, _ in model.named_modules() if path.rsplit(".", 1)[-1] in CUT}
    parallelize_module(model, mesh, plan)
    lines = [json.loads(line) for line in (HERE / name / "data.jsonl").read_text().splitlines()]
    found = train(model, lines, golden)
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def make_llama():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = HERE / "sliced-llama"
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    lengths = torch.randint(2, 25, (STEPS * BATCH,)).tolist()
    lines = [{"input_ids": torch.randint(2, VOCABULARY, (length,)).tolist()} for length in lengths]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY}
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


def main():
    make_llama()
    found = {"torch": torch.__version__}
    context = mp.get_context("spawn")
    for name in ("sliced-llama", "tied"):
        golden = json.loads((HERE / name / "golden.json").read_text())
        for processes in (2, 4):
            queue = context.SimpleQueue()
            mp.spawn(work, args=(processes, name, golden, queue), nprocs=processes)
            found.setdefault(name, {})[str(processes)] = queue.get()
    (HERE / "slices.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
