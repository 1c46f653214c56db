"""Kinds of rotary positions in transformers, in f64 and on small odd shapes: ten AdamW steps, and greedy continuations
beyond the positions that a model was first trained with.

Makes, below rotary/, a directory a case: config.json (of transformers 5, or as version 4 wrote it), model.safetensors,
data.jsonl and golden.json (losses and gradient norms of each step, the losses of the first batch's sequences one by one,
prompts, and the tokens that greedy decoding with a KV cache adds to each).

    pip install torch transformers && python rotary.py [CASE...]
"""

import itertools
import json
import pathlib
import sys

import torch
import transformers
from transformers import (
    AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
STEPS, RATE, DECAY, BATCH, MICRO_BATCH, VOCABULARY = 10, 3e-3, 0.1, 5, 2, 41
LENGTHS, NEW, MARGIN, DISTINCT = (3, 8, 13), 24, 1e-3, 5
SIZES = dict(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=20, initializer_range=0.2, attention_dropout=0.0,
             bos_token_id=None, eos_token_id=None, pad_token_id=None, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=48)
SHORT, LONG = [1.0, 1.1, 1.3, 1.8, 2.0, 2.5], [1.2, 2.0, 3.5, 5.0, 8.0, 9.0]
# By case: the config, and the keys that version 4 has in place of `rope_parameters`.
CASES = {
    "llama-yarn": (LlamaConfig(**SIZES, rope_parameters=dict(
        rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=12)), None),
    "qwen2-yarn": (Qwen2Config(**{**SIZES, "max_position_embeddings": 10}), dict(rope_theta=1000.0, rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=10))),
    # As gpt-oss and DeepSeek have them.
    "mistral-yarn": (MistralConfig(**SIZES, head_dim=16, sliding_window=9, rope_parameters=dict(
        rope_type="yarn", rope_theta=150.0, factor=3.0, original_max_position_embeddings=16, beta_fast=4.0,
        beta_slow=0.5, mscale=1.0, mscale_all_dim=0.5, truncate=False)), None),
    "llama-dynamic": (LlamaConfig(**{**SIZES, "max_position_embeddings": 12}), dict(rope_theta=100.0, rope_scaling=dict(
        type="dynamic", factor=3.5))),
    "llama-linear": (LlamaConfig(**{**SIZES, "max_position_embeddings": 16}), dict(rope_scaling=dict(
        type="linear", factor=2.5))),
    "qwen3-longrope": (Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True, rope_parameters=dict(
        rope_type="longrope", rope_theta=100.0, short_factor=SHORT, long_factor=LONG, factor=4.0,
        original_max_position_embeddings=12)), None),
    # Phi-3 and Phi-3.5 with 128k positions, and Phi-4-mini.
    "phi3-longrope": (Phi3Config(**SIZES), dict(original_max_position_embeddings=12, rope_theta=100.0,
                                                rope_scaling=dict(type="longrope", short_factor=SHORT, long_factor=LONG))),
    "phi3-partial": (Phi3Config(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3},
                                tie_word_embeddings=True, original_max_position_embeddings=12, rope_parameters=dict(
        rope_type="longrope", rope_theta=100.0, partial_rotary_factor=0.75, short_factor=SHORT[:3],
        long_factor=LONG[:3])), None),
    "gemma3-layers": (Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=12, query_pre_attn_scalar=12, sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters={
            "full_attention": dict(rope_type="longrope", rope_theta=500.0, short_factor=SHORT, long_factor=LONG,
                                   factor=4.0, original_max_position_embeddings=12),
            "sliding_attention": dict(rope_type="yarn", rope_theta=100.0, factor=2.0, attention_factor=1.25,
                                      original_max_position_embeddings=16)}), None),
}
WINDOWED = {"mistral-yarn", "gemma3-layers"}


def forward(model, **inputs):
    # Without what dynamic frequencies remember of earlier forwards.
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq
    return model(**inputs).logits


def loss_of(model, lines, labelled):
    """The part of a micro-batch in the mean loss over all labels of its batch."""
    width = max(len(line["input_ids"]) for line in lines)
    pad = lambda line, key, fill: line[key] + [fill] * (width - len(line[key]))
    ids = torch.tensor([pad(line, "input_ids", 1) for line in lines])
    mask = torch.tensor([[int(at < len(line["input_ids"])) for at in range(width)] for line in lines])
    labels = torch.tensor([pad(line, "labels", -100) for line in lines])[:, 1:]
    logits = forward(model, input_ids=ids, attention_mask=mask)[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100, reduction="sum") / labelled


def labelled(lines):
    return sum(label != -100 for line in lines for label in line["labels"][1:])


def train(model, lines):
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
         {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}], lr=RATE)
    with torch.no_grad():
        singles = [float(loss_of(model, [line], labelled([line]))) for line in lines[:BATCH]]
    losses, norms = [], []
    for step in range(STEPS):
        batch = lines[step * BATCH:(step + 1) * BATCH]
        optimizer.zero_grad()
        losses.append(0.0)
        for first in range(0, BATCH, MICRO_BATCH):
            loss = loss_of(model, batch[first:first + MICRO_BATCH], labelled(batch))
            loss.backward()
            losses[-1] += float(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, float("inf"))))
        optimizer.step()
    return {"losses": losses, "norms": norms, "singles": singles}


def sequences(case, generator):
    lines = []
    for index in range(BATCH * STEPS):
        # No padding where there is a window: a padded query whose window has no token is NaN.
        if case not in WINDOWED or index % MICRO_BATCH == 0 or index % BATCH == 0:
            length = int(torch.randint(4, 25, (1,), generator=generator))
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        lines.append({"input_ids": ids, "labels": [-100 if (index + at) % 5 == 0 else id for at, id in enumerate(ids)]})
    if case in WINDOWED:  # micro-batches begin anew in each batch
        for index, line in enumerate(lines):
            first = index - index % BATCH % MICRO_BATCH
            for key in line:
                line[key] = (line[key] * 24)[:len(lines[first]["input_ids"])]
    return lines


@torch.no_grad()
def greedy(load, prompt):
    """The tokens that a fresh model adds to a prompt, and the least margin by which one was ahead of the second best."""
    ids = torch.tensor([prompt])
    found = load().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
                            output_logits=True, return_dict_in_generate=True)
    margins = [float(logits[0].topk(2).values.diff().abs()) for logits in found.logits]
    return found.sequences[0, len(prompt):].tolist(), min(margins)


def made(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def main():
    here = pathlib.Path(__file__).parent / "rotary"
    for case, (config, older) in CASES.items():
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        folder = here / case
        load = lambda dtype: AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32).to(dtype).eval()
        for seed in itertools.count():
            made(config, seed).save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
            if older:
                keys = json.loads((folder / "config.json").read_text())
                del keys["rope_parameters"]
                keys.pop("original_max_position_embeddings", None)
                (folder / "config.json").write_text(json.dumps({**keys, **older}, indent=2) + "\n")
            generator = torch.Generator().manual_seed(seed)
            prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
            found = [greedy(lambda: load(torch.float64), prompt) for prompt in prompts]
            distinct = [len(set(tokens)) for tokens, _ in found]
            if min(distinct) > DISTINCT and min(margin for _, margin in found) > MARGIN:
                break
        for prompt, (tokens, _) in zip(prompts, found):
            assert greedy(lambda: load(torch.float32), prompt)[0] == tokens, (case, len(prompt))
        lines = sequences(case, generator)
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        model = load(torch.float64)
        model.train()
        golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE, "weight_decay": DECAY,
                  "transformers": transformers.__version__, "float64": train(model, lines), "prompts": prompts,
                  "greedy": [tokens for tokens, _ in found]}
        (folder / "golden.json").write_text(json.dumps(golden) + "\n")
        print(case, "seed", seed, "distinct", distinct, "margin", min(margin for _, margin in found), flush=True)


if __name__ == "__main__":
    main()
