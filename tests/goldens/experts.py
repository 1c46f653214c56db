"""Ten AdamW steps of the families with experts, in f64 and f32, on small odd shapes.

Makes the same files as families.py, beside itself. The smallest distance between the k-th and the
(k + 1)-th logit of any row, in any step, is at least GAP: a rounding that made a row choose another
expert would look like a mistake. SEEDS has the first seeds for which this is so.

    pip install torch transformers && python experts.py [--search] [CASE...]
"""

import itertools
import json
import pathlib
import sys

import torch
import transformers
from transformers import (
    GptOssConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3NextConfig,
)

import families
from families import BATCH, DECAY, RATE, STEPS, VOCABULARY

GAP = 1e-3
BASE = dict(vocab_size=VOCABULARY, hidden_size=30, num_attention_heads=3, initializer_range=0.2,
            max_position_embeddings=40, attention_dropout=0.0, bos_token_id=None, eos_token_id=None)
MIXTRAL = dict(**BASE, num_local_experts=5, num_experts_per_tok=2, intermediate_size=14)
# Gates are clamped, and the window is shorter than most sequences.
GPT_OSS = dict(**BASE, num_key_value_heads=1, head_dim=12, num_local_experts=5, num_experts_per_tok=2,
               intermediate_size=14, sliding_window=4, swiglu_limit=0.8,
               rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
                                    truncate=False, original_max_position_embeddings=8))
CASES = {
    "gpt_oss": GptOssConfig(**GPT_OSS, num_hidden_layers=2),
    "gpt_oss-classes": GptOssConfig(**GPT_OSS, num_hidden_layers=1, num_labels=3, pad_token_id=1),
    "mixtral": MixtralConfig(**MIXTRAL, num_hidden_layers=2, num_key_value_heads=1),
    "mixtral-classes": MixtralConfig(**MIXTRAL, num_hidden_layers=1, num_key_value_heads=3, num_labels=3,
                                     pad_token_id=1),
    "mixtral-tokens": MixtralConfig(**MIXTRAL, num_hidden_layers=1, num_key_value_heads=3, num_labels=5,
                                    pad_token_id=1, classifier_dropout=0.0),
    "qwen3_moe": Qwen3MoeConfig(**BASE, num_hidden_layers=2, num_key_value_heads=1, head_dim=12, num_experts=7,
                                num_experts_per_tok=3, moe_intermediate_size=14, intermediate_size=46,
                                norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True),
    # One of its blocks is dense. Its config.json has no head_dim.
    "qwen3_moe-sparse": Qwen3MoeConfig(**BASE, num_hidden_layers=2, num_key_value_heads=3, num_experts=7,
                                       num_experts_per_tok=3, moe_intermediate_size=14, intermediate_size=46,
                                       norm_topk_prob=False, decoder_sparse_step=2),
    # In each step some experts have no rows.
    "qwen3_moe-idle": Qwen3MoeConfig(**BASE, num_hidden_layers=1, num_key_value_heads=3, head_dim=6, num_experts=16,
                                     num_experts_per_tok=1, moe_intermediate_size=6, intermediate_size=46,
                                     norm_topk_prob=False),
    "qwen3_moe-window": Qwen3MoeConfig(**BASE, num_hidden_layers=1, num_key_value_heads=1, head_dim=12, num_experts=5,
                                       num_experts_per_tok=2, moe_intermediate_size=14, intermediate_size=46,
                                       use_sliding_window=True, sliding_window=4),
    "olmoe": OlmoeConfig(**BASE, pad_token_id=None, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2,
                         intermediate_size=14),
    "qwen2_moe": Qwen2MoeConfig(**BASE, num_hidden_layers=2, num_key_value_heads=1, num_experts=6,
                                num_experts_per_tok=2, moe_intermediate_size=14, intermediate_size=46,
                                shared_expert_intermediate_size=22),
    # Every other block has the window.
    "qwen2_moe-window": Qwen2MoeConfig(**BASE, num_hidden_layers=2, num_key_value_heads=1, num_experts=4,
                                       num_experts_per_tok=2, moe_intermediate_size=6, intermediate_size=46,
                                       shared_expert_intermediate_size=10, use_sliding_window=True, sliding_window=4),
    # Its epsilon is that of qwen3_5_text in families.py.
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**BASE, rms_norm_eps=0.02, num_hidden_layers=3, num_key_value_heads=1, head_dim=16,
                                             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
                                             linear_value_head_dim=10, linear_conv_kernel_dim=3, num_experts=6,
                                             num_experts_per_tok=2, moe_intermediate_size=14, shared_expert_intermediate_size=10,
                                             layer_types=["linear_attention", "full_attention", "linear_attention"]),
    # So is that of this one. Its first block is dense.
    "qwen3_next": Qwen3NextConfig(**BASE, rms_norm_eps=0.02, num_hidden_layers=3, num_key_value_heads=1, head_dim=16,
                                  linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
                                  linear_value_head_dim=10, linear_conv_kernel_dim=3, num_experts=6, num_experts_per_tok=2,
                                  moe_intermediate_size=14, shared_expert_intermediate_size=10, intermediate_size=22,
                                  mlp_only_layers=[0], layer_types=["linear_attention", "full_attention", "linear_attention"]),
}
SEEDS = {"gpt_oss": 0, "gpt_oss-classes": 8, "mixtral": 3, "mixtral-classes": 0, "mixtral-tokens": 5, "olmoe": 0, "qwen3_moe": 13, "qwen3_moe-sparse": 4,
         "qwen3_moe-idle": 0, "qwen3_moe-window": 3, "qwen2_moe": 8, "qwen2_moe-window": 3, "qwen3_5_moe_text": 44, "qwen3_next": 7}
SHORT = 5  # The idle case has shorter sequences than this.
families.CLASSES |= {case: config for case, config in CASES.items() if case.endswith("-classes")}
families.WINDOWED |= {case for case in CASES if case.endswith("-window")}
families.TOKENS["mixtral-tokens"] = CASES["mixtral-tokens"]
families.CAUSAL |= CASES.keys() - families.CLASSES.keys() - families.TOKENS.keys()


class Routes:
    """Watches a model's routers: the smallest gap of a row that is no padding, and the idle experts."""

    def __init__(self, model):
        self.gap, self.idle, self.mask = float("inf"), [], None
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self.route)

    def enter(self, _, inputs, named):
        mask = named.get("attention_mask")
        self.mask = torch.ones(named["input_ids"].numel()) if mask is None else mask.flatten()

    def route(self, router, _, outputs):
        logits, _, chosen = outputs
        ordered = logits.detach()[self.mask > 0].sort(dim=-1, descending=True).values
        self.gap = min(self.gap, float((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min()))
        self.idle.append(router.num_experts - len(chosen[self.mask > 0].unique()))


def sequences(case, seed):
    lines = families.sequences(case, torch.Generator().manual_seed(seed))
    if case.endswith("idle"):
        lines = [{key: list[:2 + at % (SHORT - 2)] for key, list in line.items()} for at, line in enumerate(lines)]
        for line in lines:
            line["labels"] = line["input_ids"]
    return lines


def weights(case, seed):
    config = CASES[case]
    config._experts_implementation = "eager"  # the default computes in no f64
    torch.manual_seed(seed)
    model = kind_of(case).from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def kind_of(case):
    kinds = {"classes": transformers.AutoModelForSequenceClassification,
             "tokens": transformers.AutoModelForTokenClassification}
    return kinds.get(case.partition("-")[2], transformers.AutoModelForCausalLM)


def train(case, model, lines):
    """The golden numbers of a case, and what its routers did."""
    model.train()
    routes = Routes(model)
    return families.train(case, model, lines), routes


def search(case):
    for seed in itertools.count():
        _, routes = train(case, weights(case, seed).to(torch.float64), sequences(case, seed))
        if routes.gap >= GAP:
            return seed


def main():
    here = pathlib.Path(__file__).parent
    searches = "--search" in sys.argv
    wanted = [argument for argument in sys.argv[1:] if argument in CASES] or CASES
    for case in wanted:
        seed = search(case) if searches else SEEDS[case]
        folder = here / case
        weights(case, seed).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        lines = sequences(case, seed)
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE,
                  "weight_decay": DECAY, "transformers": transformers.__version__}
        for dtype in (torch.float64, torch.float32):
            model = kind_of(case).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
            numbers, routes = train(case, model.to(dtype), lines)
            assert routes.gap >= GAP, f"{case}: a gap of {routes.gap}"
            assert not case.endswith("idle") or min(routes.idle) > 0
            golden[str(dtype).removeprefix("torch.")] = numbers
            if dtype == torch.float32:
                del golden["float32"]["logits"]
        (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
        print(f'"{case}": {seed}, gap {routes.gap:.1e}, idle {min(routes.idle)} to {max(routes.idle)}', flush=True)


if __name__ == "__main__":
    main()
