//! `[objective]`: a loss of whole records, such as a chosen and a rejected answer.

use serde::{Deserialize, Serialize};

use super::check::{is_not_negative, is_positive, must, refuse};
use super::{Config, OnResume, TooLong};
use crate::error::Error;
use crate::objectives::{Objective, Preference, PreferenceKind};

/// `[objective]`. A record of a preference has the columns `chosen` and `rejected`: texts behind a
/// text `prompt`, or messages. `step.batch` then counts records, and `step.micro_batch` sequences,
/// of which a record has two. Dropout is 0 unless `model.dropout` sets it.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ObjectiveConfig {
    /// What a step minimises: `cross-entropy` of all labelled tokens, or the mean over its records
    /// of a preference loss: `dpo`, `ipo`, `hinge`, `simpo`, `orpo` or `cpo`. The first three
    /// compare answers with a reference.
    pub kind: ObjectiveKind,
    /// The reference of `dpo`, `ipo` and `hinge`. `before`: the model as the run begins, with the
    /// adapters that it begins with; its log-probabilities are computed before the first step.
    /// `columns`: those that records bring in the columns `ref_chosen_logps` and
    /// `ref_rejected_logps`. When absent: the columns where data has them, else `before`.
    pub reference: Option<ReferenceKind>,
    /// β of a preference loss. When absent: 2 for `simpo`, else 0.1.
    pub beta: Option<f64>,
    /// γ of `simpo`, by which the scaled difference of the answers must exceed 0. When absent: 0.5.
    pub gamma: Option<f64>,
    /// The share of records whose answers are taken to be the wrong way round, for `dpo` (cDPO) and
    /// `simpo`.
    pub label_smoothing: f64,
    /// With `kind = "dpo"`: the robust form, whose mean over records of which a share of
    /// `label_smoothing` is the wrong way round is the loss without them.
    pub robust: bool,
    /// The factor of the mean cross entropy of all tokens of chosen answers, which is added. When
    /// absent: 1 for `orpo` and `cpo`, else 0.
    pub sft: Option<f64>,
    /// The sequences of a record of the objective that a program gives (`Builder::objective`).
    #[serde(skip)]
    pub own_sequences: Option<usize>,
}

/// What a step minimises.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ObjectiveKind {
    /// The mean cross entropy of all labelled positions.
    #[default]
    CrossEntropy,
    /// Direct preference optimisation.
    Dpo,
    /// Identity preference optimisation.
    Ipo,
    /// The hinge loss of SLiC.
    Hinge,
    /// Simple preference optimisation, of log-probabilities a token and without a reference.
    Simpo,
    /// Odds ratio preference optimisation, without a reference.
    Orpo,
    /// Contrastive preference optimisation, without a reference.
    Cpo,
}

/// The reference that a preference loss compares answers with.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ReferenceKind {
    /// The model as the run begins.
    Before,
    /// The log-probabilities in columns of the data.
    Columns,
}

impl ObjectiveKind {
    fn preference(self) -> Option<PreferenceKind> {
        Some(match self {
            ObjectiveKind::CrossEntropy => return None,
            ObjectiveKind::Dpo => PreferenceKind::Dpo,
            ObjectiveKind::Ipo => PreferenceKind::Ipo,
            ObjectiveKind::Hinge => PreferenceKind::Hinge,
            ObjectiveKind::Simpo => PreferenceKind::Simpo,
            ObjectiveKind::Orpo => PreferenceKind::Orpo,
            ObjectiveKind::Cpo => PreferenceKind::Cpo,
        })
    }
}

impl ObjectiveConfig {
    pub(super) const ON_RESUME: OnResume =
        OnResume::free("").with_changes("beta gamma label_smoothing robust sft");

    /// The preference loss; `None`: cross entropy.
    pub fn preference(&self) -> Option<Preference> {
        let kind = self.kind.preference()?;
        let beta = if kind == PreferenceKind::Simpo { 2.0 } else { 0.1 };
        let adds = matches!(kind, PreferenceKind::Orpo | PreferenceKind::Cpo);
        Some(Preference {
            kind,
            beta: self.beta.unwrap_or(beta),
            gamma: self.gamma.unwrap_or(0.5),
            label_smoothing: self.label_smoothing,
            robust: self.robust,
            sft: self.sft.unwrap_or(if adds { 1.0 } else { 0.0 }),
        })
    }

    /// Sequences of a record.
    fn sequences(&self) -> usize {
        let of_kind = || self.preference().map_or(1, |preference| preference.sequences());
        self.own_sequences.unwrap_or_else(of_kind).max(1)
    }
}

impl Config {
    /// The sequences of a step: `step.batch` counts records.
    pub fn sequences(&self) -> usize {
        self.step.batch.saturating_mul(self.objective.sequences())
    }

    pub(super) fn check_objective(&self) -> Result<(), Error> {
        let ObjectiveConfig { kind, beta, gamma, label_smoothing, robust, sft, reference, .. } =
            self.objective;
        must(beta.is_none_or(is_positive), "objective.beta", "a finite number above 0")?;
        let be = "a finite number, 0 or more";
        must(gamma.is_none_or(is_not_negative), "objective.gamma", be)?;
        must(sft.is_none_or(is_not_negative), "objective.sft", be)?;
        let be = "from 0 to 0.5";
        must((0.0..=0.5).contains(&label_smoothing), "objective.label_smoothing", be)?;
        let is_preference = kind != ObjectiveKind::CrossEntropy;
        let is_own = self.objective.own_sequences.is_some();
        let what = "is for a program without an objective of its own: leave it out";
        refuse(is_own && is_preference, "objective.kind", what)?;
        let is_dpo = kind == ObjectiveKind::Dpo;
        let is_simpo = kind == ObjectiveKind::Simpo;
        let preference = "is for a preference: set objective.kind, for example to \"dpo\"";
        refuse(beta.is_some() && !is_preference, "objective.beta", preference)?;
        refuse(sft.is_some() && !is_preference, "objective.sft", preference)?;
        refuse(gamma.is_some() && !is_simpo, "objective.gamma", "is for kind = \"simpo\"")?;
        let is_smoothed = label_smoothing > 0.0;
        let what = "is for kind = \"dpo\" or \"simpo\"";
        refuse(is_smoothed && !is_dpo && !is_simpo, "objective.label_smoothing", what)?;
        refuse(robust && !is_dpo, "objective.robust", "is for kind = \"dpo\"")?;
        let what = "is for a label_smoothing above 0 and below 0.5";
        refuse(robust && !(is_smoothed && label_smoothing < 0.5), "objective.robust", what)?;
        let compares = self.objective.preference().is_some_and(|one| one.needs_reference());
        let what = "is for kind = \"dpo\", \"ipo\" or \"hinge\"";
        refuse(reference.is_some() && !compares, "objective.reference", what)?;
        if !is_preference {
            return Ok(());
        }
        let what = "joins texts, and the answers of a preference stay apart (nothing is padded): \
                    leave it out";
        refuse(self.data.packing, "data.packing", what)?;
        let what = "is \"random\", which has no answers: name records with chosen and rejected";
        refuse(self.data.train.is("random"), "data.train", what)?;
        let what = "is \"split\", and an answer cannot be split: set \"cut\", or \"error\"";
        refuse(self.data.too_long == TooLong::Split, "data.too_long", what)?;
        let what = "leaves layers out, and the reference has all of them: leave it out";
        refuse(compares && self.depth.drop > 0.0, "depth.drop", what)
    }
}
