"""Ten AdamW steps of each family of transformers, in f64 and f32, on small odd shapes.

Makes, beside itself, a directory a family: config.json, model.safetensors, data.jsonl (as transformers
and the user write them) and golden.json (losses and gradient norms of each step, and the losses of the
first batch's sequences one by one, and the logits of the first sequence, before them).

    pip install torch transformers && python families.py [FAMILY...]
"""

import json
import pathlib
import sys

import torch
import transformers
from transformers import (
    AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig, CamembertConfig, Cohere2Config, CohereConfig, DistilBertConfig, ElectraConfig, Ernie4_5Config, Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, Glm4Config, GlmConfig, GPT2Config, GPTNeoXConfig, GraniteConfig, HeliumConfig, LlamaConfig, Ministral3Config, MinistralConfig, MistralConfig, ModernBertConfig, Olmo2Config,
    Olmo3Config, OPTConfig, Phi3Config, Qwen2Config, Qwen3_5TextConfig, Qwen3Config, RobertaConfig, SeedOssConfig, SmolLM3Config, Starcoder2Config, XLMRobertaConfig,
)

STEPS, RATE, DECAY, BATCH, VOCABULARY = 10, 3e-3, 0.1, 5, 61
DECODER = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=56, initializer_range=0.2,
               max_position_embeddings=40, attention_dropout=0.0, bos_token_id=None, eos_token_id=None,
               pad_token_id=None)
ENCODER = dict(vocab_size=VOCABULARY, initializer_range=0.2)
DROPS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
FAMILIES = {
    "llama": LlamaConfig(**DECODER, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
                         rope_parameters=dict(rope_type="llama3", rope_theta=100.0, factor=4.0,
                                              low_freq_factor=1.0, high_freq_factor=4.0,
                                              original_max_position_embeddings=8)),
    "mistral": MistralConfig(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
                             head_dim=12, sliding_window=4),
    "qwen2": Qwen2Config(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
                         tie_word_embeddings=True, use_sliding_window=True, sliding_window=3,
                         max_window_layers=1),
    "qwen3": Qwen3Config(**DECODER, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
                         head_dim=12, tie_word_embeddings=True),
    "bert": BertConfig(**ENCODER, **DROPS, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
                       intermediate_size=56, max_position_embeddings=30, type_vocab_size=2),
    "roberta": RobertaConfig(**ENCODER, **DROPS, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
                             intermediate_size=56, max_position_embeddings=32, type_vocab_size=1),
    "distilbert": DistilBertConfig(**ENCODER, dim=48, n_layers=1, n_heads=3, hidden_dim=56, dropout=0.0,
                                   attention_dropout=0.0, max_position_embeddings=30),
}
ENCODERS = {family: FAMILIES[family] for family in ("bert", "roberta", "distilbert")}
CLASSES = {
    **{f"{family}-classes": type(config)(**{**config.to_dict(), "num_labels": 3})
       for family, config in ENCODERS.items()},
    "bert-value": type(FAMILIES["bert"])(**{**FAMILIES["bert"].to_dict(), "num_labels": 1}),
    # Classes on decoders; batches of several need a token for padding.
    **{f"{family}-classes": type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), "num_labels": 3, "pad_token_id": 1})
       for family in ("llama", "mistral", "qwen3")},
    "gpt2-classes": GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=3, n_positions=40, initializer_range=0.2,
                               resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, num_labels=3, pad_token_id=1,
                               bos_token_id=None, eos_token_id=None),
}
TOKENS = {f"{family}-tokens": type(config)(**{**config.to_dict(), "num_labels": 5})
          for family, config in {"bert": FAMILIES["bert"], "distilbert": FAMILIES["distilbert"],
                                 "gpt2": CLASSES["gpt2-classes"], "llama": FAMILIES["llama"]}.items()}
for config in [*CLASSES.values(), *TOKENS.values()]:
    config.classifier_dropout = config.seq_classif_dropout = 0.0
FAMILIES |= CLASSES | TOKENS
FAMILIES["phi3"] = Phi3Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=5)
FAMILIES["gemma3_text"] = Gemma3TextConfig(
    **DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
    query_pre_attn_scalar=20, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
OPT = dict(vocab_size=VOCABULARY, hidden_size=42, num_hidden_layers=2, num_attention_heads=3,
           ffn_dim=56, init_std=0.2, max_position_embeddings=40, dropout=0.0, bos_token_id=None,
           eos_token_id=None)
FAMILIES["opt"] = OPTConfig(**OPT)
CLASSES["opt-classes"] = FAMILIES["opt-classes"] = OPTConfig(**OPT, num_labels=3)
FAMILIES["olmo2"] = Olmo2Config(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, attention_bias=True)
FAMILIES["olmo3"] = Olmo3Config(
    **DECODER, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3, sliding_window=5,
    rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 8,
                                        "attention_factor": 1.2},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}})
FAMILIES["smollm3"] = SmolLM3Config(**DECODER, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                    no_rope_layers=[1, 0, 1, 0])
FAMILIES["starcoder2"] = Starcoder2Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                          sliding_window=5)
FAMILIES["gemma2"] = Gemma2Config(
    **DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=20, query_pre_attn_scalar=24,
    sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=5.0)
FAMILIES["granite"] = GraniteConfig(**DECODER, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                                    attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.35,
                                    logits_scaling=1.75, tie_word_embeddings=True)
FAMILIES["glm4"] = Glm4Config(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=12)
FAMILIES["glm"] = GlmConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                            attention_bias=False, tie_word_embeddings=True, partial_rotary_factor=0.375)
FAMILIES["cohere"] = CohereConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, logit_scale=0.3,
                                  attention_bias=True)
FAMILIES["cohere2"] = Cohere2Config(**DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, logit_scale=0.8,
                                    sliding_window=5, tie_word_embeddings=False,
                                    layer_types=["sliding_attention", "full_attention", "sliding_attention"])
FAMILIES["ministral"] = MinistralConfig(**DECODER, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
                                        sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
FAMILIES["gpt_neox"] = GPTNeoXConfig(
    vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=56, initializer_range=0.2,
    max_position_embeddings=40, bos_token_id=None, eos_token_id=None, rope_parameters={"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.375})
FAMILIES["ministral3"] = Ministral3Config(
    **DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
    rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 5.0, "original_max_position_embeddings": 8, "beta_fast": 8.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3})
FAMILIES["xlm-roberta"] = XLMRobertaConfig(**ENCODER, **DROPS, hidden_size=48, num_hidden_layers=1, num_attention_heads=3,
                                           intermediate_size=56, max_position_embeddings=32, type_vocab_size=1)
CLASSES["camembert-classes"] = FAMILIES["camembert-classes"] = CamembertConfig(
    **ENCODER, **DROPS, hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=56,
    max_position_embeddings=32, type_vocab_size=1, num_labels=3, classifier_dropout=0.0)
ENCODERS["xlm-roberta"] = FAMILIES["xlm-roberta"]
MODERN = dict(**ENCODER, hidden_size=48, num_attention_heads=3, intermediate_size=56, max_position_embeddings=40,
              pad_token_id=1, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None)
FAMILIES["modernbert"] = ModernBertConfig(**MODERN, num_hidden_layers=4, local_attention=6)
CLASSES["modernbert-classes"] = FAMILIES["modernbert-classes"] = ModernBertConfig(
    **MODERN, num_hidden_layers=2, local_attention=8, num_labels=3, classifier_pooling="mean", classifier_bias=True,
    layer_types=["sliding_attention", "full_attention"])
TOKENS["modernbert-tokens"] = FAMILIES["modernbert-tokens"] = ModernBertConfig(
    **MODERN, num_hidden_layers=2, local_attention=4, num_labels=5, norm_bias=True, attention_bias=True, mlp_bias=True,
    rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
# The first position reads little where its query and key are nearly orthogonal, and the norm behind it amplifies the rounding
# of that. A larger epsilon bounds it.
FAMILIES["qwen3_5_text"] = Qwen3_5TextConfig(
    **DECODER, rms_norm_eps=0.02, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1, head_dim=20, attention_bias=True,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=3,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.3, "mrope_section": [1, 1, 1],
                     "mrope_interleaved": True})
FAMILIES["qwen3_5_text-tied"] = Qwen3_5TextConfig(
    **DECODER, rms_norm_eps=0.01, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=1,
    linear_num_value_heads=3, linear_key_head_dim=7, linear_value_head_dim=35, tie_word_embeddings=True,
    layer_types=["linear_attention", "full_attention"])
ELECTRA = dict(**ENCODER, **DROPS, embedding_size=48, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=56,
               max_position_embeddings=30, classifier_dropout=0.0)
CLASSES["electra-classes"] = FAMILIES["electra-classes"] = ElectraConfig(**ELECTRA, num_labels=3)
TOKENS["electra-tokens"] = FAMILIES["electra-tokens"] = ElectraConfig(**ELECTRA, num_labels=5)
FAMILIES["seed_oss"] = SeedOssConfig(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=12,
                                     residual_dropout=0.0, attention_out_bias=True, mlp_bias=True)
FAMILIES["ernie4_5"] = Ernie4_5Config(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=12, use_bias=True)
FAMILIES["helium"] = HeliumConfig(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=16, mlp_bias=True)
# With heads that blocks can be cut by, into two and four slices.
FAMILIES["qwen3-slices"] = Qwen3Config(**DECODER, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=6,
                                       tie_word_embeddings=True)
FAMILIES["gpt_neox-slices"] = GPTNeoXConfig(
    vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56, initializer_range=0.2,
    max_position_embeddings=40, bos_token_id=None, eos_token_id=None, rope_parameters={"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5})
FAMILIES["opt-slices"] = OPTConfig(**{**OPT, "hidden_size": 44, "num_attention_heads": 4})
FAMILIES["qwen2-slices"] = Qwen2Config(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
                                       use_sliding_window=True, sliding_window=3, max_window_layers=1)
FAMILIES["modernbert-slices"] = ModernBertConfig(**{**MODERN, "num_attention_heads": 4}, num_hidden_layers=3, local_attention=6)
SMALL = {**ELECTRA, "embedding_size": 24}
CLASSES["electra-small-classes"] = FAMILIES["electra-small-classes"] = ElectraConfig(**SMALL, num_labels=3)
TOKENS["electra-small-tokens"] = FAMILIES["electra-small-tokens"] = ElectraConfig(**SMALL, num_labels=5)
GEMMA4 = dict(**DECODER, num_hidden_layers=4, num_attention_heads=4, hidden_size_per_layer_input=0, sliding_window=5,
              layer_types=["sliding_attention", "full_attention"] * 2)
FAMILIES["gemma4_text"] = Gemma4TextConfig(
    **GEMMA4, num_key_value_heads=2, head_dim=12, global_head_dim=20, num_global_key_value_heads=1, attention_k_eq_v=True,
    final_logit_softcapping=5.0, use_bidirectional_attention="vision",
    rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.35, "rope_theta": 500.0},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
FAMILIES["gemma4_text-values"] = Gemma4TextConfig(
    **GEMMA4, num_key_value_heads=1, head_dim=16, global_head_dim=8, attention_bias=True, tie_word_embeddings=False)
# One norm over all heads of the queries and one over those of the keys, which are fewer (OLMo 2 and 3 of 32B).
FAMILIES["olmo2-grouped"] = Olmo2Config(**DECODER, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)
# Each head of queries and of keys has a norm with scales of its own (Command R+).
FAMILIES["cohere-norms"] = CohereConfig(**DECODER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, logit_scale=0.3,
                                        use_qk_norm=True)
FAMILIES["gpt2-unscaled"] = GPT2Config(
    vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=3, n_positions=40, initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, scale_attn_weights=False)
# Without a bias for each token; two blocks with a window, one without, then one with it.
FAMILIES["modernbert-unbiased"] = ModernBertConfig(
    **MODERN, num_hidden_layers=4, local_attention=6, decoder_bias=False,
    layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"])
# Inputs of each block, and keys and values of other blocks, with feed-forwards of two widths (E2B) and of one (E4B).
SMALL4 = {**DECODER, "initializer_range": 0.1, "rms_norm_eps": 0.01}
FAMILIES["gemma4_text-inputs"] = Gemma4TextConfig(
    **SMALL4, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=1, head_dim=12, global_head_dim=20, sliding_window=5,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                 "full_attention"],
    hidden_size_per_layer_input=10, vocab_size_per_layer_input=VOCABULARY + 6, num_kv_shared_layers=3, use_double_wide_mlp=True,
    final_logit_softcapping=5.0)
FAMILIES["gemma4_text-shared"] = Gemma4TextConfig(
    **SMALL4, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=10, global_head_dim=16,
    num_global_key_value_heads=1, attention_k_eq_v=True, attention_bias=True, tie_word_embeddings=False, sliding_window=4,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=2)
WINDOWED = {"modernbert", "modernbert-unbiased", "modernbert-classes", "modernbert-tokens", "cohere2", "ministral", "gemma2", "gemma3_text", "mistral", "qwen2", "mistral-classes", "olmo3", "phi3", "starcoder2", "qwen2-slices", "modernbert-slices", "gemma4_text", "gemma4_text-values", "gemma4_text-inputs", "gemma4_text-shared"}
# By their numbers, one would have a sequence without a label, and the norms of the other would be far off in 16 bits.
SEEDS = {"gemma3_text": 77, "gemma4_text": 1003}
# Scores without a factor are sharp, and so amplify rounding: queries of these are shorter.
SHORT_QUERIES = {"gemma4_text-inputs", "gemma4_text-shared"}
CAUSAL = {"cohere", "cohere2", "gemma2", "glm", "glm4", "gpt_neox", "granite", "ministral", "ministral3", "gemma3_text", "llama", "mistral", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_5_text-tied", "smollm3", "starcoder2", "seed_oss", "ernie4_5", "helium", "qwen3-slices", "gpt_neox-slices", "opt-slices", "qwen2-slices", "gemma4_text", "gemma4_text-values", "gemma4_text-inputs", "gemma4_text-shared", "olmo2-grouped", "cohere-norms", "gpt2-unscaled"}


def move_scalars(model):
    """The numbers that multiply outputs of Gemma 4's blocks are buffers."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.add_(0.1 * torch.randn_like(buffer))


def sequences(family, generator):
    lines = []
    for index in range(BATCH * STEPS):
        # A padded query whose window has no token is NaN in transformers, and with it the gradient: no
        # padding where there is a window.
        if family not in WINDOWED or index % BATCH == 0:
            length = int(torch.randint(2, 25, (1,), generator=generator))
        # Token 1 is what RoBERTa takes for padding.
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        classes = 5 if family in TOKENS else VOCABULARY
        labels = [-100 if (index + at) % 5 == 0 else token % classes for at, token in enumerate(ids)]
        line = {"input_ids": ids, "labels": labels}
        if family in CLASSES:
            line = {"input_ids": ids, "label": round(0.37 * length - 3, 2) if "value" in family else index % 3}
        if family.startswith("bert"):
            line["token_type_ids"] = [int(at > length // 2) for at in range(length)]
        lines.append(line)
    return lines


def loss_of(family, model, batch):
    width = max(len(line["input_ids"]) for line in batch)
    pad = lambda line, key, fill: line[key] + [fill] * (width - len(line[key]))
    inputs = {"input_ids": torch.tensor([pad(line, "input_ids", 1) for line in batch]),
              "attention_mask": torch.tensor([[int(at < len(line["input_ids"])) for at in range(width)]
                                              for line in batch])}
    if family.startswith("bert"):
        inputs["token_type_ids"] = torch.tensor([pad(line, "token_type_ids", 0) for line in batch])
    logits = model(**inputs).logits
    if family in CLASSES:
        labels = torch.tensor([line["label"] for line in batch])
        if "value" in family:
            return torch.nn.functional.mse_loss(logits[:, 0], labels.to(logits.dtype))
        return torch.nn.functional.cross_entropy(logits, labels)
    labels = torch.tensor([pad(line, "labels", -100) for line in batch])
    if family in CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)


def train(family, model, lines):
    parameters = list(model.parameters())
    # gpt-oss has the biases of all experts of a block in one matrix.
    # Command R+ has the scales of all heads of a block in one matrix.
    decays = [p.ndim > 1 and not name.endswith(("bias", "_norm.weight")) for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p, is_decayed in zip(parameters, decays) if is_decayed], "weight_decay": DECAY},
         {"params": [p for p, is_decayed in zip(parameters, decays) if not is_decayed], "weight_decay": 0.0}], lr=RATE)
    with torch.no_grad():
        singles = [float(loss_of(family, model, [line])) for line in lines[:BATCH]]
        ids = torch.tensor([lines[0]["input_ids"]])
        logits = [round(logit, 7) for logit in model(input_ids=ids).logits.flatten().tolist()]
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(family, model, lines[step * BATCH:(step + 1) * BATCH])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, float("inf"))))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms, "singles": singles, "logits": logits}


def main():
    here = pathlib.Path(__file__).parent
    for number, (family, config) in enumerate(FAMILIES.items()):
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        torch.manual_seed(number)
        kind = AutoModelForCausalLM if family in CAUSAL else AutoModelForMaskedLM
        if family in CLASSES:
            kind = AutoModelForSequenceClassification
        if family in TOKENS:
            kind = AutoModelForTokenClassification
        model = kind.from_config(config, attn_implementation="eager")
        with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or name.endswith("_norm.weight"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
                if family in SHORT_QUERIES and name.endswith("q_norm.weight"):
                    parameter.mul_(0.3)
            move_scalars(model)
        folder = here / family
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        lines = sequences(family, torch.Generator().manual_seed(SEEDS.get(family, number)))
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE,
                  "weight_decay": DECAY, "transformers": transformers.__version__}
        for dtype in (torch.float64, torch.float32):
            again = kind.from_pretrained(folder, attn_implementation="eager").to(dtype)
            again.train()
            golden[str(dtype).removeprefix("torch.")] = train(family, again, lines)
            if dtype == torch.float32:
                del golden["float32"]["logits"]
        (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
