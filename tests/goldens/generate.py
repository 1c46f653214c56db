"""Greedy continuations of transformers' causal families, in f64 without a cache, on small odd shapes.

Makes, below generate/, a directory a family: config.json, model.safetensors (as transformers writes them)
and golden.json (prompts, and the tokens greedy decoding adds to each).

    pip install torch transformers && python generate.py [FAMILY...]
"""

import itertools
import json
import pathlib
import sys

import torch
import transformers
from transformers import (
    AutoModelForCausalLM, Cohere2Config, CohereConfig, Ernie4_5Config, Gemma2Config, Gemma4TextConfig, Glm4Config, GPT2Config, GPTNeoXConfig, GptOssConfig, GraniteConfig, HeliumConfig, LlamaConfig, Ministral3Config, MistralConfig, Olmo3Config, OPTConfig, Qwen2MoeConfig,
    Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig, SeedOssConfig, SmolLM3Config, Starcoder2Config,
)

from families import move_scalars

LENGTHS, NEW, MARGIN, DISTINCT = (1, 5, 17), 64, 1e-3, 5
ALL = dict(vocab_size=97, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
DECODER = dict(**ALL, hidden_size=48, intermediate_size=24, max_position_embeddings=96, attention_dropout=0.0)
FAMILIES = {
    "gpt2": GPT2Config(**ALL, n_embd=48, n_layer=2, n_head=3, n_inner=24, n_positions=96, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0),
    "llama": LlamaConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
                         rope_parameters=dict(rope_type="llama3", rope_theta=100.0, factor=4.0,
                                              low_freq_factor=1.0, high_freq_factor=4.0,
                                              original_max_position_embeddings=8)),
    "mistral": MistralConfig(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
                             head_dim=12, sliding_window=7),
    "qwen3": Qwen3Config(**DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
                         head_dim=12, tie_word_embeddings=True),
    "qwen2_moe": Qwen2MoeConfig(**DECODER | dict(hidden_size=32), num_hidden_layers=2, num_attention_heads=4,
                                num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
                                shared_expert_intermediate_size=20, tie_word_embeddings=True),
    "gpt_oss": GptOssConfig(**DECODER | dict(hidden_size=32), num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=12, num_local_experts=5, num_experts_per_tok=2,
                            sliding_window=6, swiglu_limit=0.9,
                            rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=6.0, truncate=False,
                                                 original_max_position_embeddings=16)),
    # An untied head, and the activation function of Galactica.
    "opt": OPTConfig(**ALL, hidden_size=42, num_hidden_layers=2, num_attention_heads=3, ffn_dim=24,
                     init_std=0.2, max_position_embeddings=96, dropout=0.0,
                     activation_function="gelu", tie_word_embeddings=False),
    "olmo3": Olmo3Config(**DECODER, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3, sliding_window=7),
    "smollm3": SmolLM3Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             no_rope_layer_interval=2),
    "starcoder2": Starcoder2Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    "gemma2": Gemma2Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
                           query_pre_attn_scalar=16, sliding_window=7, attn_logit_softcapping=3.0, final_logit_softcapping=9.0,
                           tie_word_embeddings=False),
    "granite": GraniteConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=1.5),
    "glm4": Glm4Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12),
    "cohere": CohereConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, logit_scale=2.0,
                           tie_word_embeddings=False),
    "cohere2": Cohere2Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, logit_scale=2.0,
                             sliding_window=7, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False),
    "gpt_neox": GPTNeoXConfig(**ALL, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24,
                              max_position_embeddings=96, use_parallel_residual=False),
    "ministral3": Ministral3Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
                                   rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 6.0, "beta_fast": 8.0,
                                                    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                                    "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}),
    "qwen3_5_text": Qwen3_5TextConfig(**DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
                                      linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
                                      linear_value_head_dim=5, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "seed_oss": SeedOssConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
                              attention_out_bias=True, residual_dropout=0.0),
    "ernie4_5": Ernie4_5Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12),
    "helium": HeliumConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12),
    "gemma4_text": Gemma4TextConfig(
        **DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=10, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=9.0, tie_word_embeddings=False),
    "gemma4_text-inputs": Gemma4TextConfig(
        **DECODER, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=10, global_head_dim=16,
        hidden_size_per_layer_input=6, vocab_size_per_layer_input=97, sliding_window=7, num_kv_shared_layers=2, use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=9.0),
    "qwen3_next": Qwen3NextConfig(**DECODER | dict(hidden_size=32), num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
                                  head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
                                  linear_value_head_dim=5, layer_types=["linear_attention", "full_attention"], num_experts=6,
                                  num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20),
}
# Saved as bf16, as such models mostly are; computed with as f64 and f32 all the same.
HALF = {"llama": torch.bfloat16, "qwen3": torch.bfloat16, "qwen2_moe": torch.bfloat16, "gpt_oss": torch.bfloat16}


def made(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        move_scalars(model)
    return model


def experts(config):
    """The argument that runs experts one by one: the other ways refuse f64 and small odd widths."""
    return {"experts_implementation": "eager"} if hasattr(config, "num_experts") else {}


@torch.no_grad()
def greedy(model, prompt):
    """The tokens, and the least margin by which one was ahead of the second best."""
    ids, least = list(prompt), float("inf")
    for _ in range(NEW):
        logits, tokens = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        least = min(least, float(logits[0] - logits[1]))
        ids.append(int(tokens[0]))
    return ids[len(prompt):], least


def main():
    here = pathlib.Path(__file__).parent / "generate"
    for family, config in FAMILIES.items():
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        folder = here / family
        for seed in itertools.count():
            made(config, seed).to(HALF.get(family, torch.float32)).save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
            load = lambda: AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32, **experts(config)).eval()
            exact, single = load().to(torch.float64), load()
            generator = torch.Generator().manual_seed(seed)
            prompts = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in LENGTHS]
            found = [greedy(exact, prompt) for prompt in prompts]
            distinct = [len(set(tokens)) for tokens, _ in found]
            if min(distinct) > DISTINCT and min(margin for _, margin in found) > MARGIN:
                break
        for prompt, (tokens, _) in zip(prompts, found):
            ids = torch.tensor([prompt])
            again = single.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                    max_new_tokens=NEW)[0, len(prompt):].tolist()
            assert again == tokens, (family, len(prompt))
        print(family, "seed", seed, "distinct", distinct, "margin", min(margin for _, margin in found))
        golden = {"prompts": prompts, "greedy": [tokens for tokens, _ in found],
                  "transformers": transformers.__version__}
        (folder / "golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
