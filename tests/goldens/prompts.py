"""What sentence-transformers makes of texts behind prompts, with the models and tokenizers of text.py, in f64.

Makes prompts.json: the token ids of texts behind a prompt, how many of them are the prompt's, embeddings that count these
or do not, and losses and gradient norms of AdamW steps with a prompt for each column.

    pip install torch transformers sentence-transformers && python prompts.py
"""

import json
import pathlib
import shutil
import tempfile

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from families import DECAY, RATE

HERE = pathlib.Path(__file__).parent
MODELS = {"wordpiece": "mean", "bpe": "cls", "llama": "lasttoken"}  # the last of them trains
POOLINGS = [("mean", False), ("cls", False), ("lasttoken", False), ("mean", True)]
PROMPTS = {"query": "the query: ", "document": "a text of a document", "none": ""}
DEFAULT = "query"
TEXTS = ["what is a layer?", "Each arrow is a message."]
COLUMNS = {"anchor": PROMPTS["query"], "positive": PROMPTS["document"], "negative": "no: "}
STEPS, RECORDS, SCALE = 5, 4, 10.0


def open_model(folder, mode, includes):
    transformer = Transformer(str(folder), model_kwargs={"attn_implementation": "eager", "dtype": torch.float64})
    transformer.tokenizer.pad_token = transformer.tokenizer.pad_token or "</s>"  # asked for, and not used
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode, include_prompt=includes)
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu", prompts=PROMPTS, default_prompt_name=DEFAULT)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def columns(collator, model, record):
    """The embedding of each column of a record, by itself, so that nothing is padded."""
    batch = collator([record])
    of = lambda name: {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(f"{name}_")}
    return [model(of(name))["sentence_embedding"][0] for name in record]


def train(model, records):
    collator = SentenceTransformerDataCollator(preprocess_fn=model.preprocess, prompts=COLUMNS)
    loss_of = losses.MultipleNegativesRankingLoss(None, scale=SCALE)
    named = list(model.named_parameters())
    groups = [{"params": [p for _, p in named if (p.ndim > 1) == decays], "weight_decay": DECAY * decays}
              for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    found = {"losses": [], "norms": []}
    for step in range(STEPS):
        texts = [columns(collator, model, record) for record in records[step * RECORDS:(step + 1) * RECORDS]]
        loss = loss_of.compute_loss_from_embeddings([torch.stack(column) for column in zip(*texts)], None)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], float("inf"))
        optimizer.step()
        found["losses"].append(float(loss))
        found["norms"].append(float(norm))
    return found


def main():
    words = (HERE / "text" / "stream.txt").read_text().split()
    text = lambda nth: " ".join(words[7 * nth % 300:][:3 + nth % 5])
    records = [dict(zip(COLUMNS, (text(3 * nth), text(3 * nth + 1), text(3 * nth + 2)))) for nth in range(STEPS * RECORDS)]
    golden = {"prompts": PROMPTS, "default": DEFAULT, "texts": TEXTS, "columns": COLUMNS, "records": records,
              "batch": RECORDS, "scale": SCALE, "learning_rate": RATE, "weight_decay": DECAY}
    for name, mode in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder) / name
            # With a chat template a text would be a message of a chat.
            shutil.copytree(HERE / "text" / name, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
            of_model = {"pooling": mode, "tokens": {}, "prompt_lengths": {}, "embeddings": []}
            for pooling, includes in POOLINGS:
                model = open_model(folder, pooling, includes).eval()
                embeddings = [model.encode([text])[0].tolist() for text in TEXTS]
                rounded = [[round(number, 8) for number in one] for one in embeddings]
                of_model["embeddings"].append({"pooling": pooling, "include_prompt": includes, "of_texts": rounded})
            for prompt, before in PROMPTS.items():
                made = [model.preprocess([text], prompt=before) for text in TEXTS]
                of_model["tokens"][prompt] = [one["input_ids"][0].tolist() for one in made]
                of_model["prompt_lengths"][prompt] = made[0].get("prompt_length", 0)
            of_model |= train(open_model(folder, mode, False).train(), records)
            golden[name] = of_model
    (HERE / "prompts.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
