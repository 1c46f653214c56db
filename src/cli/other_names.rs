//! The names that other tools have for keys of the config: transformers' trainer, PEFT, TRL,
//! sentence-transformers, axolotl, Lightning, nanoGPT and fairseq.

/// Names of other tools, each with the key here and a note on the difference.
const NAMES: &[(&[&str], &str, &str)] = &[
    (&["lr", "learning_rates", "max_lr", "peak_lr"], "optimizer.learning_rate", ""),
    (&["min_lr", "lr_end", "eta_min"], "optimizer.min_learning_rate", ""),
    (&["lr_scheduler_type", "lr_scheduler", "lr_schedule", "scheduler"], "optimizer.schedule", ""),
    (&["warmup", "num_warmup_steps", "warmup_iters"], "optimizer.warmup_steps", ""),
    (&["warmup_ratio"], "optimizer.warmup_steps", "a number of steps, not a share of them"),
    (&["optim", "optimizer_name", "optimizer_type"], "optimizer.kind", ""),
    (&["adam_beta1", "adam_beta2", "beta1", "beta2"], "optimizer.betas", "a list of both"),
    (&["adam_epsilon", "adam_eps"], "optimizer.epsilon", ""),
    (&["wd", "l2"], "optimizer.weight_decay", ""),
    (&["ema_decay"], "optimizer.ema", ""),
    (
        &["max_grad_norm", "grad_clip", "gradient_clipping", "gradient_clip_val", "clip_grad_norm"],
        "optimizer.clip_norm",
        "",
    ),
    (
        &["batch_size", "train_batch_size", "global_batch_size"],
        "step.batch",
        "all sequences of a step; step.micro_batch is how many the device computes at once",
    ),
    (
        &["per_device_train_batch_size", "micro_batch_size", "per_gpu_train_batch_size"],
        "step.micro_batch",
        "sequences that the device computes at once; step.batch is all of a step",
    ),
    (
        &[
            "gradient_accumulation_steps",
            "gradient_accumulation",
            "accumulate_grad_batches",
            "grad_accum",
        ],
        "step.batch",
        "all sequences of a step, in micro-batches of step.micro_batch: their ratio is the number \
         of accumulation steps",
    ),
    (&["num_train_epochs", "num_epochs", "n_epochs", "max_epochs"], "step.epochs", ""),
    (&["max_steps", "total_steps", "train_steps", "num_steps", "max_iters"], "step.steps", ""),
    (&["random_seed", "data_seed"], "step.seed", ""),
    (
        &[
            "max_length",
            "max_seq_length",
            "max_seq_len",
            "seq_length",
            "seq_len",
            "context_length",
            "cutoff_len",
            "sequence_len",
            "model_max_length",
        ],
        "data.sequence_length",
        "",
    ),
    (&["sample_packing", "pack", "packed"], "data.packing", ""),
    (&["neftune_noise_alpha", "noise_alpha"], "train.neftune_alpha", ""),
    (
        &[
            "router_aux_loss_coef",
            "aux_loss_coef",
            "moe_aux_loss_coeff",
            "load_balancing_loss_coef",
        ],
        "experts.balance_loss",
        "",
    ),
    (
        &["z_loss_coeff", "moe_z_loss_coeff", "router_z_loss_coef", "z_loss_weight"],
        "experts.z_loss",
        "",
    ),
    (&["moe_expert_capacity_factor", "expert_capacity"], "experts.capacity_factor", ""),
    (&["moe_router_load_balancing_type", "load_balancing_type"], "experts.balance_of", ""),
    (&["label_smoothing_factor"], "train.label_smoothing", ""),
    (&["loss_type"], "objective.kind", ""),
    (&["simpo_gamma"], "objective.gamma", ""),
    (&["center_rewards_coefficient"], "objective.centre", ""),
    (&["cpo_alpha", "rpo_alpha"], "objective.sft", ""),
    (&["matryoshka_dims", "matryoshka_dimensions"], "objective.dimensions", ""),
    (&["triplet_margin"], "objective.margin", ""),
    (&["distance_metric"], "objective.distance", ""),
    (&["num_negatives"], "objective.negatives", ""),
    (&["pooling_mode"], "model.pooling", ""),
    (&["normalize_embeddings"], "model.normalise", ""),
    (&["default_prompt_name"], "model.default_prompt", ""),
    (&["dataset", "datasets", "dataset_name", "train_file", "train_data"], "data.train", ""),
    (&["validation_file", "eval_dataset", "eval_data", "val_file"], "data.validation", ""),
    (&["val_size", "val_set_size", "test_size"], "data.validation_split", ""),
    (&["mlm_probability"], "data.mask_probability", ""),
    (
        &["model_name_or_path", "base_model", "model_name", "pretrained_model", "model_id"],
        "model.path",
        "a directory",
    ),
    (&["num_hidden_layers", "num_layers", "n_layer", "n_layers"], "model.layers", ""),
    (&["hidden_size", "n_embd", "d_model"], "model.hidden", ""),
    (&["num_attention_heads", "n_head", "n_heads", "num_heads"], "model.heads", ""),
    (&["num_key_value_heads", "n_kv_heads"], "model.kv_heads", ""),
    (&["intermediate_size", "n_inner", "d_ff"], "model.intermediate", ""),
    (&["num_experts", "num_local_experts", "n_experts"], "model.experts", ""),
    (&["num_experts_per_tok", "moe_top_k", "moe_router_topk"], "model.experts_per_token", ""),
    (&["moe_intermediate_size", "moe_ffn_hidden_size"], "model.expert_intermediate", ""),
    (&["vocab_size"], "model.vocabulary", ""),
    (&["max_position_embeddings", "n_positions", "n_ctx"], "model.positions", ""),
    (&["hidden_dropout_prob", "resid_pdrop", "attention_dropout"], "model.dropout", ""),
    (&["num_labels", "id2label", "label_names"], "model.labels", ""),
    (&["lora_r", "lora_rank", "r"], "train.lora.rank", ""),
    (&["lora_alpha"], "train.lora.alpha", ""),
    (&["lora_dropout"], "train.lora.dropout", ""),
    (&["target_modules", "lora_target_modules"], "train.lora.targets", ""),
    (&["use_rslora"], "train.lora.rank_stabilised", ""),
    (&["load_in_4bit", "bnb_4bit_quant_type"], "train.base", "\"nf4\""),
    (&["load_in_8bit"], "train.base", "\"int8\""),
    (&["fp16", "bf16", "tf32", "precision", "mixed_precision", "torch_dtype"], "device.dtype", ""),
    (&["gpus", "devices", "num_gpus"], "device.ordinals", "a list of numbers"),
    (
        &["gradient_checkpointing", "activation_checkpointing", "checkpoint_activations"],
        "schedule.recompute",
        "",
    ),
    (&["output_dir", "save_dir", "checkpoint_dir", "out_dir"], "checkpoint.directory", ""),
    (&["save_steps", "save_interval", "save_every"], "checkpoint.every_steps", ""),
    (&["save_total_limit"], "checkpoint.keep", ""),
    (&["eval_steps", "eval_interval", "val_check_interval"], "validation.every_steps", ""),
    (&["eval_iters", "limit_val_batches"], "validation.batches", ""),
    (&["early_stopping_patience"], "validation.patience", ""),
    (&["logging_dir", "report_to", "tensorboard_dir"], "log.tensorboard", "a folder"),
    (&["run_name"], "metrics.run", ""),
];

/// The key that another tool's name stands for, with a note on the difference, or "".
pub(super) fn key_of(name: &str) -> Option<(&'static str, &'static str)> {
    let name = name.to_lowercase().replace('-', "_");
    let last = name.rsplit('.').next().unwrap_or_default();
    let found = NAMES.iter().find(|(names, ..)| names.contains(&last))?;
    Some((found.1, found.2))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::layers::known_keys;
    use super::*;

    #[test]
    fn each_name_is_there_once_and_stands_for_a_key() {
        let known = known_keys();
        let mut met = BTreeSet::new();
        for (names, key, _) in NAMES {
            assert!(known.iter().any(|known| known == key), "{key}");
            for name in *names {
                assert!(met.insert(name), "{name} twice");
                // Names that are keys here are never looked up.
                assert!(!known.iter().any(|known| known.ends_with(&format!(".{name}"))), "{name}");
            }
        }
    }

    #[test]
    fn a_section_and_the_spelling_do_not_matter() {
        for name in ["lr", "optimizer.lr", "LR"] {
            assert_eq!(key_of(name), Some(("optimizer.learning_rate", "")));
        }
        assert_eq!(key_of("lora.r").map(|found| found.0), Some("train.lora.rank"));
        assert_eq!(key_of("max-length").map(|found| found.0), Some("data.sequence_length"));
        assert_eq!(key_of("bach"), None);
    }
}
