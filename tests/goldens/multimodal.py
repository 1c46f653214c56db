"""Ten AdamW steps on text of models that also read images, in f64 and f32, as `families.py` trains its own.

Makes, beside itself, a directory a model: config.json, model.safetensors, data.jsonl and golden.json. What reads images
is there, and gets no gradient.

    pip install torch transformers && python multimodal.py
"""

import json
import pathlib

import torch
import transformers
from families import BATCH, DECAY, DECODER, RATE, STEPS, sequences, train
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

NAME = "gemma3_text"  # whose data these models have
TEXT = Gemma3TextConfig(**DECODER, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
                        query_pre_attn_scalar=20, sliding_window=5)
VISION = SiglipVisionConfig(hidden_size=12, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                            patch_size=4)
CONFIG = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=1, image_token_index=60, image_token_id=60,
                      boi_token_index=59, eoi_token_index=58)


def main():
    folder = pathlib.Path(__file__).parent / "gemma3"
    torch.manual_seed(1)
    model = Gemma3ForConditionalGeneration._from_config(CONFIG, attn_implementation="eager")
    with torch.no_grad():  # norms begin as zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    lines = [{key: [min(token, 57) for token in values] for key, values in line.items()}
             for line in sequences(NAME, torch.Generator().manual_seed(77))]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    golden = {"batch": BATCH, "clip_norm": None, "steps": STEPS, "learning_rate": RATE,
              "weight_decay": DECAY, "transformers": transformers.__version__}
    for dtype in (torch.float64, torch.float32):
        again = Gemma3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").to(dtype)
        for name, parameter in again.named_parameters():
            parameter.requires_grad_("language_model" in name)
        # In training, transformers asks which tokens are an image's. None is.
        golden[str(dtype).removeprefix("torch.")] = train(NAME, again.eval(), lines)
        if dtype == torch.float32:
            del golden["float32"]["logits"]
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
