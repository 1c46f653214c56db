//! `[objective]`: a loss of whole records, such as a chosen and a rejected answer.

use serde::{Deserialize, Serialize};

use super::check::{is_not_negative, is_positive, must, refuse};
use super::{Config, OnResume, Task, TooLong};
use crate::error::Error;
use crate::objectives::{
    Binary, Contrastive, Distance, Objective, Preference, PreferenceKind, Reward, Similarity,
    SimilarityKind, Triplet,
};

/// `[objective]`. A record of a preference has the columns `chosen` and `rejected`: texts behind a
/// text `prompt`, or messages. Dropout is then 0 unless `model.dropout` sets it. A record of
/// `contrastive` has the texts `anchor` and `positive`, and perhaps hard negatives. A record of
/// `reward` is a preference, perhaps with a `margin`, and one of `binary` has the texts `query` and
/// `document`, and a `label` from 0 to 1. `step.batch` counts records, and `step.micro_batch`
/// sequences.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ObjectiveConfig {
    /// What a step minimises: `cross-entropy` of all labelled tokens, or the mean over its records
    /// of a preference loss: `dpo`, `ipo`, `hinge`, `simpo`, `orpo` or `cpo`. The first three
    /// compare answers with a reference. Of sentence embeddings (`model.task` is then
    /// `sentence-embedding`): `contrastive`, the cross entropy of each anchor's positive among the
    /// positives and negatives of all records of the step (MultipleNegativesRankingLoss of
    /// sentence-transformers); `cosine`, the mean squared difference of a pair's cosine and its
    /// score; `cosent`, the order of all cosines of the step against that of the scores; `triplet`.
    /// Of the one score of a sequence (`model.task` is then `sequence-classification`, with one
    /// label): `reward`, that a chosen answer has a higher score than a rejected one (TRL's
    /// RewardTrainer); `binary`, the binary cross entropy of the score of a query with a document
    /// (BinaryCrossEntropyLoss of sentence-transformers' CrossEncoder).
    pub kind: ObjectiveKind,
    /// The reference of `dpo`, `ipo` and `hinge`. `before`: the model as the run begins, with the
    /// adapters that it begins with; its log-probabilities are computed before the first step.
    /// `columns`: those that records bring in the columns `ref_chosen_logps` and
    /// `ref_rejected_logps`. `in-step`: the model without the adapters of `train.lora`, computed in
    /// each step beside the model, from the same uploads. When absent: the columns where data has
    /// them, else `before`.
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
    /// With `reward`: the factor of the squared sum of both scores, which pulls scores to a mean of
    /// 0. When absent: 0.
    pub centre: Option<f64>,
    /// The factor of the cosines of `contrastive` and `cosent`. When absent: 20.
    pub scale: Option<f64>,
    /// With `contrastive`: the mean of the loss and of the same loss of each positive among all
    /// anchors of the step.
    pub symmetric: bool,
    /// With `contrastive`: how many hard negatives each record has, in the column `negative`, in
    /// `negative_1`, `negative_2` and so on, or in the list `negatives`.
    pub negatives: usize,
    /// With `contrastive`: whether a candidate with the tokens of the anchor, or of the anchor's
    /// positive, is left out of the anchor's negatives (`mask`), or is one of them (`keep`). When
    /// absent: `mask`.
    pub duplicates: Option<Duplicates>,
    /// With a loss of sentence embeddings: the loss is the sum over embeddings of the first so many
    /// numbers, as in `[768, 256, 64]` (Matryoshka). When empty, over embeddings of all numbers.
    pub dimensions: Vec<usize>,
    /// With `triplet`: by how much the negative must be farther away than the positive. When
    /// absent: 5, or 0.5 with `distance = "cosine"`.
    pub margin: Option<f64>,
    /// With `triplet`: `euclidean`, the length of the difference of two embeddings, or `cosine`,
    /// 1 less the cosine. When absent: `euclidean`.
    pub distance: Option<Distance>,
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
    /// The contrastive loss of sentence embeddings, with all texts of the step as negatives.
    Contrastive,
    /// The squared difference of a pair's cosine and its score.
    Cosine,
    /// The order of the cosines of all pairs of the step, against that of their scores (CoSENT).
    Cosent,
    /// An anchor is nearer to its positive than to its negative, by a margin.
    Triplet,
    /// A reward model: the chosen answer has a higher score than the rejected one.
    Reward,
    /// A reranker: the binary cross entropy of the score of a query with a document.
    Binary,
}

/// The record of a loss of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScoreRecord {
    /// A chosen and a rejected answer.
    Answers,
    /// Two texts as one sequence, with a label.
    Texts,
}

/// The texts of a record for a loss of sentence embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TextRecord {
    /// Hard negatives, beside an anchor and its positive.
    pub(crate) negatives: usize,
    /// The bounds of the record's score, if it has one.
    pub(crate) scores: Option<[f32; 2]>,
}

/// What becomes of a candidate that is a text of the anchor's record.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Duplicates {
    /// It is left out.
    Mask,
    /// It is a negative.
    Keep,
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
    /// The base without adapters, in each step.
    InStep,
}

impl ObjectiveKind {
    fn preference(self) -> Option<PreferenceKind> {
        Some(match self {
            ObjectiveKind::CrossEntropy
            | ObjectiveKind::Contrastive
            | ObjectiveKind::Cosine
            | ObjectiveKind::Cosent
            | ObjectiveKind::Triplet
            | ObjectiveKind::Reward
            | ObjectiveKind::Binary => return None,
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
    pub(super) const ON_RESUME: OnResume = OnResume::free("").with_changes(
        "beta centre dimensions distance duplicates gamma label_smoothing margin robust scale sft \
         symmetric",
    );

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

    /// The objective; `None`: cross entropy.
    pub(crate) fn built(&self) -> Option<Box<dyn Objective>> {
        let dimensions = self.dimensions.clone();
        let scale = self.scale.unwrap_or(20.0);
        let similarity = |kind| Some(Box::new(Similarity { kind, scale, dimensions }) as Box<_>);
        match self.kind {
            ObjectiveKind::Contrastive => Some(Box::new(Contrastive {
                negatives: self.negatives,
                scale,
                symmetric: self.symmetric,
                keeps_duplicates: self.duplicates == Some(Duplicates::Keep),
                dimensions: self.dimensions.clone(),
            })),
            ObjectiveKind::Cosine => similarity(SimilarityKind::Cosine),
            ObjectiveKind::Cosent => similarity(SimilarityKind::CoSent),
            ObjectiveKind::Reward => {
                Some(Box::new(Reward { centre: self.centre.unwrap_or_default() }))
            }
            ObjectiveKind::Binary => Some(Box::new(Binary)),
            ObjectiveKind::Triplet => {
                let distance = self.distance.unwrap_or_default();
                let usual = if distance == Distance::Cosine { 0.5 } else { 5.0 };
                let margin = self.margin.unwrap_or(usual);
                Some(Box::new(Triplet { margin, distance, dimensions: self.dimensions.clone() }))
            }
            _ => Some(Box::new(self.preference()?)),
        }
    }

    /// True for an objective on sentence embeddings.
    pub(crate) fn reads_embeddings(&self) -> bool {
        self.text_record().is_some()
    }

    /// The texts of a record, for a loss of sentence embeddings.
    pub(crate) fn text_record(&self) -> Option<TextRecord> {
        let scored = |low, high| Some(TextRecord { negatives: 0, scores: Some([low, high]) });
        let texts = |negatives| Some(TextRecord { negatives, scores: None });
        match self.kind {
            ObjectiveKind::Contrastive => texts(self.negatives),
            ObjectiveKind::Triplet => texts(1),
            ObjectiveKind::Cosine => scored(-1.0, 1.0),
            ObjectiveKind::Cosent => scored(f32::MIN, f32::MAX),
            _ => None,
        }
    }

    /// The record of a loss of scores, if the objective is one.
    pub(crate) fn score_record(&self) -> Option<ScoreRecord> {
        match self.kind {
            ObjectiveKind::Reward => Some(ScoreRecord::Answers),
            ObjectiveKind::Binary => Some(ScoreRecord::Texts),
            _ => None,
        }
    }

    /// True if the objective compares two answers, into which dropout would bring noise.
    pub(crate) fn compares_answers(&self) -> bool {
        self.preference().is_some() || self.kind == ObjectiveKind::Reward
    }

    /// True if each record needs the log-probabilities of its answers by a reference.
    pub(crate) fn needs_references(&self) -> bool {
        let compares = self.preference().is_some_and(|one| one.needs_reference());
        compares && self.reference != Some(ReferenceKind::InStep)
    }

    /// Sequences of a record.
    pub(crate) fn sequences(&self) -> usize {
        let of_kind = || self.built().map_or(1, |objective| objective.sequences());
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
        let is_preference = kind.preference().is_some();
        let is_own = self.objective.own_sequences.is_some();
        let what = "is for a program without an objective of its own: leave it out";
        refuse(is_own && kind != ObjectiveKind::CrossEntropy, "objective.kind", what)?;
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
        self.check_embeddings()?;
        self.check_scores()?;
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

    /// Checks the keys of objectives on scores, and what goes with them.
    fn check_scores(&self) -> Result<(), Error> {
        let ObjectiveConfig { kind, centre, .. } = self.objective;
        let is_reward = kind == ObjectiveKind::Reward;
        refuse(centre.is_some() && !is_reward, "objective.centre", "is for kind = \"reward\"")?;
        must(centre.is_none_or(is_not_negative), "objective.centre", "a finite number, 0 or more")?;
        if self.objective.score_record().is_none() {
            return Ok(());
        }
        let task = self.model.task.filter(|task| *task != Task::SequenceClassification);
        if let Some(task) = task {
            let problem = format_args!(
                "is {:?}, and objective.kind is a loss of scores: leave it out, or set \
                 \"sequence-classification\"",
                task.name()
            );
            return Err(Error::config("model.task", problem));
        }
        let what = "joins texts, and each has a score of its own (nothing is padded): leave it out";
        refuse(self.data.packing, "data.packing", what)?;
        let columns = if is_reward { "chosen and rejected" } else { "query, document and label" };
        let what = format!("is \"random\", which has no records: name some with {columns}");
        refuse(self.data.train.is("random"), "data.train", &what)?;
        let what = "is \"split\", and a text has one score: set \"cut\", or \"error\"";
        refuse(self.data.too_long == TooLong::Split, "data.too_long", what)?;
        let what = "is for classes, and objective.kind is a loss of one score: leave it out";
        refuse(self.train.label_smoothing > 0.0, "train.label_smoothing", what)
    }

    /// Checks the prompts of the columns of texts.
    fn check_prompts(&self) -> Result<(), Error> {
        let record = self.objective.text_record();
        for (column, prompt) in self.data.prompts.each() {
            let key = format!("data.prompts.{column}");
            let what = "is for a loss of sentence embeddings: set objective.kind, for example to \
                        \"contrastive\"";
            refuse(prompt.is_some() && record.is_none(), &key, what)?;
            let has_none = column == "negative" && record.is_some_and(|one| one.negatives == 0);
            let what =
                "is for records with hard negatives: set objective.negatives, or leave it out";
            refuse(prompt.is_some() && has_none, &key, what)?;
        }
        Ok(())
    }

    /// Checks the keys of objectives on sentence embeddings, and what goes with them.
    fn check_embeddings(&self) -> Result<(), Error> {
        let ObjectiveConfig { kind, scale, symmetric, negatives, duplicates, .. } = self.objective;
        let ObjectiveConfig { margin, distance, ref dimensions, .. } = self.objective;
        let is_contrastive = kind == ObjectiveKind::Contrastive;
        let has_scale = is_contrastive || kind == ObjectiveKind::Cosent;
        let what = "is for kind = \"contrastive\" or \"cosent\"";
        refuse(scale.is_some() && !has_scale, "objective.scale", what)?;
        let what = "is for kind = \"contrastive\"";
        refuse(symmetric && !is_contrastive, "objective.symmetric", what)?;
        refuse(negatives > 0 && !is_contrastive, "objective.negatives", what)?;
        refuse(duplicates.is_some() && !is_contrastive, "objective.duplicates", what)?;
        let is_triplet = kind == ObjectiveKind::Triplet;
        let what = "is for kind = \"triplet\"";
        refuse(margin.is_some() && !is_triplet, "objective.margin", what)?;
        refuse(distance.is_some() && !is_triplet, "objective.distance", what)?;
        let embeds = self.objective.reads_embeddings();
        let what = "is for kind = \"contrastive\", \"cosine\", \"cosent\" or \"triplet\"";
        refuse(!dimensions.is_empty() && !embeds, "objective.dimensions", what)?;
        self.check_prompts()?;
        must(margin.is_none_or(is_not_negative), "objective.margin", "a finite number, 0 or more")?;
        must(scale.is_none_or(is_positive), "objective.scale", "a finite number above 0")?;
        must(negatives <= MOST_NEGATIVES, "objective.negatives", "at most 1024")?;
        let differ = |at: usize| dimensions[at] > 0 && !dimensions[..at].contains(&dimensions[at]);
        let be = "numbers from 1 on that differ";
        must((0..dimensions.len()).all(differ), "objective.dimensions", be)?;
        if !embeds {
            return Ok(());
        }
        let task = self.model.task.filter(|task| *task != Task::SentenceEmbedding);
        if let Some(task) = task {
            let problem = format_args!(
                "is {:?}, and objective.kind is a loss of sentence embeddings: leave it out, or \
                 set \"sentence-embedding\"",
                task.name()
            );
            return Err(Error::config("model.task", problem));
        }
        let what = "joins texts, and each text has an embedding of its own (nothing is padded): \
                    leave it out";
        refuse(self.data.packing, "data.packing", what)?;
        let what = "is \"random\", which has no pairs: name records with anchor and positive";
        refuse(self.data.train.is("random"), "data.train", what)?;
        let what = "is \"split\", and a text has one embedding: set \"cut\", or \"error\"";
        refuse(self.data.too_long == TooLong::Split, "data.too_long", what)?;
        let what = "smooths labels, and texts have none: leave it out";
        refuse(self.train.label_smoothing > 0.0, "train.label_smoothing", what)
    }
}

/// More hard negatives than any record has, and few enough to plan for.
const MOST_NEGATIVES: usize = 1024;
