"""Ten AdamW steps of transformers' GPT-2, in f64 and f32, on small odd shapes.

Makes, beside itself, a directory a case: config.json, model.safetensors, data.jsonl (as transformers
and the user write them) and golden.json (losses and gradient norms of each step).

    pip install torch transformers && python gpt2.py
"""

import json
import pathlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, RATE, DECAY = 10, 3e-3, 0.1
CASES = {
    "tied": dict(hidden=20, heads=4, layers=3, vocabulary=37, positions=12, batch=5, clip=None,
                 activation="gelu_new", tied=True, padding=True),
    "clipped": dict(hidden=21, heads=3, layers=2, vocabulary=41, positions=9, batch=4, clip=0.3,
                    activation="gelu", tied=True, padding=True),
    "untied": dict(hidden=24, heads=2, layers=1, vocabulary=29, positions=70, batch=3, clip=None,
                   activation="gelu_new", tied=False, padding=False),
}


def sequences(case, generator):
    lines = []
    for index in range(case["batch"] * STEPS):
        length = case["positions"]
        if case["padding"]:
            length = int(torch.randint(1, case["positions"] + 1, (1,), generator=generator))
        ids = torch.randint(0, case["vocabulary"], (length,), generator=generator).tolist()
        labels = [-100 if (index + at) % 5 == 0 else token for at, token in enumerate(ids)]
        lines.append({"input_ids": ids, "labels": labels})
    return lines


def train(model, case, lines):
    named = list(model.named_parameters())
    plain = [p for n, p in named if n.endswith(".bias") or ".ln_" in n]
    decayed = [p for n, p in named if not (n.endswith(".bias") or ".ln_" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}], lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        batch = lines[step * case["batch"]:(step + 1) * case["batch"]]
        width = max(len(line["input_ids"]) for line in batch)
        pad = lambda line, key, fill: line[key] + [fill] * (width - len(line[key]))
        ids = torch.tensor([pad(line, "input_ids", 0) for line in batch])
        labels = torch.tensor([pad(line, "labels", -100) for line in batch])
        mask = torch.tensor([[int(at < len(line["input_ids"])) for at in range(width)] for line in batch])
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        limit = float("inf") if case["clip"] is None else case["clip"]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms


def main():
    here = pathlib.Path(__file__).parent
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(number)
        config = GPT2Config(
            vocab_size=case["vocabulary"], n_positions=case["positions"], n_embd=case["hidden"],
            n_layer=case["layers"], n_head=case["heads"], activation_function=case["activation"],
            tie_word_embeddings=case["tied"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            initializer_range=0.2, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
        model = GPT2LMHeadModel(config)
        folder = here / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        lines = sequences(case, torch.Generator().manual_seed(number))
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        golden = {"batch": case["batch"], "clip_norm": case["clip"], "steps": STEPS,
                  "learning_rate": RATE, "weight_decay": DECAY}
        for dtype in (torch.float64, torch.float32):
            again = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").to(dtype)
            again.train()
            losses, norms = train(again, case, lines)
            golden[str(dtype).removeprefix("torch.")] = {"losses": losses, "norms": norms}
        (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
