//! `[validation]`: the loss on data that is not trained on.

use serde::{Deserialize, Serialize};

use super::check::{must, refuse};
use crate::error::Error;

/// `[validation]`
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ValidationConfig {
    /// Steps between validations; when absent, the only validation is at the end of the run.
    pub every_steps: Option<u64>,
    /// Batches of `step.batch` sequences in a validation; fewer if the validation set is smaller.
    pub batches: u64,
    /// Number of validations in a row without a better one after which training stops early; never
    /// when absent.
    pub patience: Option<u64>,
    /// The metric that decides which checkpoint is the best, and that `patience` counts: `loss`;
    /// for a model that classifies sequences also `accuracy`, `f1` or `matthews`; for a model that
    /// predicts a value also `pearson` or `spearman`; for a model that gives a sequence several
    /// labels also `subset_accuracy`, and `precision`, `recall` or `f1` with `_micro` or `_macro`;
    /// for sentence embeddings also `accuracy_1` or `mrr_10`, or, of pairs with scores, `pearson`
    /// or `spearman`; for preferences also `reward_accuracy` or `reward_margin`, and for the
    /// objectives `reward` and `binary` also `accuracy`.
    /// The first validation set decides.
    pub best: BestMetric,
}

/// The metric of a validation.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BestMetric {
    /// The loss. A lower loss is better.
    #[default]
    Loss,
    /// The share of sequences whose predicted class is right.
    Accuracy,
    /// The F1 score.
    F1,
    /// Matthews' correlation.
    Matthews,
    /// Pearson's correlation.
    Pearson,
    /// Spearman's correlation.
    Spearman,
    /// The share of sequences whose labels are all right.
    SubsetAccuracy,
    /// Precision over all labels of all sequences.
    PrecisionMicro,
    /// The mean of the labels' precisions.
    PrecisionMacro,
    /// Recall over all labels of all sequences.
    RecallMicro,
    /// The mean of the labels' recalls.
    RecallMacro,
    /// The F1 score over all labels of all sequences.
    F1Micro,
    /// The mean of the labels' F1 scores.
    F1Macro,
    /// The share of anchors whose positive is the nearest text.
    #[serde(rename = "accuracy_1")]
    Accuracy1,
    /// The mean of 1 ÷ the place of the positive, as far as it is among the first 10.
    #[serde(rename = "mrr_10")]
    Mrr10,
    /// The share of records whose chosen answer has the higher reward.
    RewardAccuracy,
    /// The mean by which the reward of chosen answers is higher.
    RewardMargin,
}

impl BestMetric {
    /// The name in config files and events.
    pub fn name(self) -> &'static str {
        match self {
            BestMetric::Loss => "loss",
            BestMetric::Accuracy => "accuracy",
            BestMetric::F1 => "f1",
            BestMetric::Matthews => "matthews",
            BestMetric::Pearson => "pearson",
            BestMetric::Spearman => "spearman",
            BestMetric::SubsetAccuracy => "subset_accuracy",
            BestMetric::PrecisionMicro => "precision_micro",
            BestMetric::PrecisionMacro => "precision_macro",
            BestMetric::RecallMicro => "recall_micro",
            BestMetric::RecallMacro => "recall_macro",
            BestMetric::F1Micro => "f1_micro",
            BestMetric::F1Macro => "f1_macro",
            BestMetric::Accuracy1 => "accuracy_1",
            BestMetric::Mrr10 => "mrr_10",
            BestMetric::RewardAccuracy => "reward_accuracy",
            BestMetric::RewardMargin => "reward_margin",
        }
    }

    /// True if a lower value is better.
    pub fn is_loss(self) -> bool {
        self == BestMetric::Loss
    }
}

impl Default for ValidationConfig {
    fn default() -> ValidationConfig {
        ValidationConfig { every_steps: None, batches: 8, patience: None, best: BestMetric::Loss }
    }
}

impl ValidationConfig {
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { every_steps, batches, patience, .. } = *self;
        must(every_steps != Some(0), "validation.every_steps", "at least 1")?;
        must(batches >= 1, "validation.batches", "at least 1")?;
        must(batches <= 1 << 30, "validation.batches", "at most 1073741824")?;
        must(patience != Some(0), "validation.patience", "at least 1")?;
        let problem = "counts validations that never happen: set validation.every_steps";
        refuse(patience.is_some() && every_steps.is_none(), "validation.patience", problem)
    }
}
