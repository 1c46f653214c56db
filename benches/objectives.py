"""Memory and speed of objectives beside TRL and sentence-transformers on the same CPU.

    cargo build --release && pip install torch transformers peft trl sentence-transformers datasets
    python benches/objectives.py dpo contrastive

Each race trains one model on the same records, as in `races.py`: the runs alternate, and the figures are medians over
rounds of the ratio of tokens/s without the first step, and of the peak resident set of the process.

    dpo          Llama-shaped of 8 x 512, LoRA of rank 8 on all linear layers, 16 records a step in micro-batches of one,
                 answers of 128 tokens behind prompts of 64: TRL's DPOTrainer, with and without gradient checkpointing,
                 whose steps compute the reference as those of "l2l in-step" do; "l2l" computes it before the first step.
                 In 500 MB of device memory three of the eight layers keep activations, and five recompute them
    contrastive  BERT-shaped of 6 x 384, 256 pairs a step in micro-batches of 32 texts, 64 tokens each:
                 CachedMultipleNegativesRankingLoss of sentence-transformers. Both go forward twice and backward once, and l2l
                 keeps no activations of layers: one layer's are 505 MB, more than all its weights and optimizer states

Options: --rounds N, --steps N, --threads N.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time

from races import PROGRAM, apart, run

VOCABULARY, RATE, RANK = 8192, 1e-4, 8
RECORDS, PROMPT, ANSWER = 16, 64, 128
PAIRS, TEXTS, LENGTH = 256, 32, 64  # 32 texts: the default of the cached loss
WAYS = {"dpo": ["trl", "trl checkpointing", "l2l", "l2l in-step"], "contrastive": ["cached", "l2l"]}


def words(numbers, count):
    return " ".join(f"w{numbers.randrange(8, VOCABULARY)}" for _ in range(count))


def prepare(folder, race, steps):
    """The model, a tokenizer of words, and the records of all steps."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    # A special token is found inside words, too, so no word may contain one.
    known = {f"w{number}": number for number in range(VOCABULARY)} | {"[unk]": 0, "[pad]": 1, "[end]": 2}
    known = {word: number for word, number in known.items() if word not in ("w0", "w1", "w2")}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[unk]", pad_token="[pad]", eos_token="[end]", model_max_length=512
    ).save_pretrained(folder)
    numbers = random.Random(0)
    if race == "dpo":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=512, pad_token_id=1, eos_token_id=2, bos_token_id=None)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        record = lambda: {"prompt": words(numbers, PROMPT) + " ", "chosen": words(numbers, ANSWER),
                          "rejected": words(numbers, ANSWER)}
        lines = [record() for _ in range(RECORDS * steps)]
    else:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        lines = [{"anchor": words(numbers, LENGTH), "positive": words(numbers, LENGTH)} for _ in range(PAIRS * steps)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def said(loss, seconds):
    print(json.dumps({"event": "step", "loss": loss, "seconds": seconds}), flush=True)


def train_with_trl(folder, options):
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                said(logs["loss"], time.perf_counter() - self.begin)

    torch.set_num_threads(options.threads)
    lines = [json.loads(line) for line in (folder / "data.jsonl").open()]
    settings = DPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=1, gradient_accumulation_steps=RECORDS,
        max_steps=options.steps, beta=0.1, learning_rate=RATE, lr_scheduler_type="constant", max_length=None,
        gradient_checkpointing=options.checkpointing, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no",
        report_to=[], max_grad_norm=0.0, weight_decay=0.0, disable_tqdm=True)
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), args=settings,
        train_dataset=Dataset.from_list(lines), processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear"), callbacks=[Steps()])
    trainer.remove_callback(PrinterCallback)  # it prints to the events
    trainer.train()


def train_with_sentence_transformers(folder, options):
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    torch.set_num_threads(options.threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"}).train()
    loss_of = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=TEXTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    lines = [json.loads(line) for line in (folder / "data.jsonl").open()]
    for step in range(options.steps):
        begin = time.perf_counter()
        part = lines[step * PAIRS : (step + 1) * PAIRS]
        texts = [model.preprocess([line[name] for line in part]) for name in ("anchor", "positive")]
        loss = loss_of(texts, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said(loss.item(), time.perf_counter() - begin)


def ours(folder, race, options, reference="before"):
    config = folder / f"{reference}.toml"
    if race == "dpo":
        own = f"""
objective = {{ kind = "dpo", reference = "{reference}" }}
train.lora = {{ rank = {RANK}, alpha = 16.0, targets = ["all-linear"] }}
step = {{ batch = {RECORDS}, micro_batch = 2, steps = {options.steps} }}
data = {{ train = "{folder}/data.jsonl", shuffle = false, sequence_length = {PROMPT + ANSWER + 1} }}
device.memory = "500MB"
"""
    else:
        own = f"""
objective.kind = "contrastive"
step = {{ batch = {PAIRS}, micro_batch = {TEXTS}, steps = {options.steps} }}
data = {{ train = "{folder}/data.jsonl", shuffle = false, sequence_length = {LENGTH} }}
"""
    config.write_text(f"""
model.path = "{folder}"
optimizer = {{ learning_rate = {RATE}, weight_decay = 0.0 }}
device.threads = {options.threads}
{own}""")
    return [PROGRAM, "train", config, "--format", "json"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("races", nargs="+", choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    if options.folder:
        peer = train_with_trl if options.races == ["dpo"] else train_with_sentence_transformers
        return peer(options.folder, options)
    for race in options.races:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            apart(prepare, folder, race, options.steps)
            peer = [sys.executable, __file__, race, "--folder", folder, "--steps", options.steps,
                    "--threads", options.threads]
            commands = {"trl": peer, "trl checkpointing": [*peer, "--checkpointing"], "cached": peer,
                        "l2l": ours(folder, race, options), "l2l in-step": ours(folder, race, options, "in-step")}
            results = {way: [] for way in WAYS[race]}
            for _ in range(options.rounds):
                for way, rounds in results.items():
                    rounds.append(run(commands[way]))
        base = results[WAYS[race][0]]
        for way, rounds in results.items():
            speed = statistics.median(peer[1] / one[1] for peer, one in zip(base, rounds))
            peak = statistics.median(one[2] for one in rounds)
            share = peak / statistics.median(one[2] for one in base)
            seconds = statistics.median(one[1] for one in rounds)
            print(f"{race} {way}: {seconds:.2f} s a step, {speed:.2f} x the speed, {peak / 1e6:.0f} MB, {share:.2f} x")
            print(f"  losses {[round(loss, 5) for loss in rounds[0][0]]}")


if __name__ == "__main__":
    main()
