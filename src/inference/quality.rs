//! GLUE's metrics (Wang et al. 2019) of predictions and labels, as scikit-learn and SciPy define
//! them.

use super::retrieval::Retrieval;

/// How the predictions of classes, of values or of sets of labels agree with their labels.
#[derive(Clone, Debug, PartialEq)]
pub enum Quality {
    /// The model predicts a class.
    Classes(Confusion),
    /// The model predicts a value; or it makes embeddings, and the cosine of a pair is the
    /// prediction of its score.
    Values(Agreement),
    /// The model predicts any number of labels.
    LabelSets(LabelCounts),
    /// The model makes embeddings, which find texts.
    Retrieval(Retrieval),
}

/// A confusion matrix: how often each class was predicted for each label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    classes: usize,
    /// (labels, predictions).
    counts: Vec<u64>,
}

/// `a / b`, or 0 if `b` is 0.
fn ratio(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

impl Confusion {
    /// An empty matrix.
    pub fn new(classes: usize) -> Confusion {
        Confusion { classes, counts: vec![0; classes * classes] }
    }

    /// The number of classes.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Counts a prediction: the class of the highest score, and the first of equal scores.
    ///
    /// # Panics
    /// The label is not a class.
    pub fn take(&mut self, label: usize, scores: &[f32]) {
        let best =
            (1..self.classes).fold(0, |best, at| if scores[at] > scores[best] { at } else { best });
        self.counts[label * self.classes + best] += 1;
    }

    /// For each label, the counts of the predicted classes.
    pub fn rows(&self) -> impl Iterator<Item = &[u64]> {
        self.counts.chunks_exact(self.classes)
    }

    fn all(&self) -> f64 {
        self.counts.iter().sum::<u64>() as f64
    }

    fn right(&self, class: usize) -> f64 {
        self.counts[class * self.classes + class] as f64
    }

    fn labelled(&self, class: usize) -> f64 {
        self.counts[class * self.classes..][..self.classes].iter().sum::<u64>() as f64
    }

    fn predicted(&self, class: usize) -> f64 {
        self.counts.iter().skip(class).step_by(self.classes).sum::<u64>() as f64
    }

    /// The share of correct predictions.
    pub fn accuracy(&self) -> f64 {
        ratio((0..self.classes).map(|class| self.right(class)).sum(), self.all())
    }

    /// The harmonic mean of precision and recall. Of two classes the second counts. With more
    /// classes it is the mean over all.
    pub fn f1(&self) -> f64 {
        let of =
            |class| ratio(2.0 * self.right(class), self.labelled(class) + self.predicted(class));
        match self.classes {
            2 => of(1),
            classes => ratio((0..classes).map(of).sum(), classes as f64),
        }
    }

    /// The correlation of labels and predictions (Matthews 1975; Gorodkin 2004).
    pub fn matthews(&self) -> f64 {
        let all = self.all();
        let classes = 0..self.classes;
        let sum = |of: &dyn Fn(usize) -> f64| classes.clone().map(of).sum::<f64>();
        let right = sum(&|class| self.right(class));
        let both = sum(&|class| self.labelled(class) * self.predicted(class));
        let labels = all * all - sum(&|class| self.labelled(class).powi(2));
        let predictions = all * all - sum(&|class| self.predicted(class).powi(2));
        ratio(right * all - both, (labels * predictions).sqrt())
    }
}

/// How often one label was predicted and was right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LabelCount {
    /// Sequences that have the label and were given it.
    pub true_positives: u64,
    /// Sequences that were given the label and do not have it.
    pub false_positives: u64,
    /// Sequences that have the label and were not given it.
    pub false_negatives: u64,
}

impl LabelCount {
    /// The share of the predictions of the label that are right; 0 without a prediction.
    pub fn precision(&self) -> f64 {
        let right = self.true_positives as f64;
        ratio(right, right + self.false_positives as f64)
    }

    /// The share of the label's sequences that were given it; 0 if no sequence has it.
    pub fn recall(&self) -> f64 {
        let right = self.true_positives as f64;
        ratio(right, right + self.false_negatives as f64)
    }

    /// The harmonic mean of precision and recall; 0 without a prediction and a sequence.
    pub fn f1(&self) -> f64 {
        let right = 2.0 * self.true_positives as f64;
        ratio(right, right + (self.false_positives + self.false_negatives) as f64)
    }
}

/// How the predicted labels of sequences agree with their labels, label by label. A label is
/// predicted if its probability is above one half: if its score is above 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelCounts {
    labels: Vec<LabelCount>,
    sequences: u64,
    /// The number of sequences whose labels are all right.
    exact: u64,
}

impl LabelCounts {
    /// No sequence of this many labels.
    pub fn new(labels: usize) -> LabelCounts {
        LabelCounts { labels: vec![LabelCount::default(); labels], sequences: 0, exact: 0 }
    }

    /// The counts of each label.
    pub fn labels(&self) -> &[LabelCount] {
        &self.labels
    }

    /// The number of sequences.
    pub fn sequences(&self) -> u64 {
        self.sequences
    }

    /// Counts a sequence, by its scores and the probabilities of its labels (0 or 1, where they are
    /// known). A sequence has a label whose probability is above one half.
    pub fn take(&mut self, known: &[f32], scores: &[f32]) {
        let mut is_exact = true;
        for ((count, known), score) in self.labels.iter_mut().zip(known).zip(scores) {
            let has = *known > 0.5;
            let is_predicted = *score > 0.0;
            is_exact &= has == is_predicted;
            count.true_positives += u64::from(has && is_predicted);
            count.false_positives += u64::from(!has && is_predicted);
            count.false_negatives += u64::from(has && !is_predicted);
        }
        self.sequences += 1;
        self.exact += u64::from(is_exact);
    }

    /// The share of sequences whose labels are all right.
    pub fn subset_accuracy(&self) -> f64 {
        ratio(self.exact as f64, self.sequences as f64)
    }

    /// The counts of all labels together, for micro averages.
    pub fn all(&self) -> LabelCount {
        let sum = |of: fn(&LabelCount) -> u64| self.labels.iter().map(of).sum();
        LabelCount {
            true_positives: sum(|label| label.true_positives),
            false_positives: sum(|label| label.false_positives),
            false_negatives: sum(|label| label.false_negatives),
        }
    }

    /// The mean over all labels (the macro average).
    pub fn mean(&self, of: fn(&LabelCount) -> f64) -> f64 {
        ratio(self.labels.iter().map(of).sum(), self.labels.len() as f64)
    }
}

/// Values and their predictions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Agreement {
    labels: Vec<f64>,
    predictions: Vec<f64>,
}

impl Agreement {
    /// Adds a value and its prediction.
    pub fn take(&mut self, label: f32, prediction: f32) {
        self.labels.push(f64::from(label));
        self.predictions.push(f64::from(prediction));
    }

    /// The linear correlation (Pearson 1895).
    pub fn pearson(&self) -> f64 {
        correlation(&self.labels, &self.predictions)
    }

    /// The correlation of ranks (Spearman 1904). Equal values have the mean of their ranks.
    pub fn spearman(&self) -> f64 {
        correlation(&ranks(&self.labels), &ranks(&self.predictions))
    }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |values: &[f64]| ratio(values.iter().sum(), values.len() as f64);
    let mean_a = mean(a);
    let mean_b = mean(b);
    let mut ab = 0.0;
    let mut aa = 0.0;
    let mut bb = 0.0;
    for (a, b) in a.iter().map(|a| a - mean_a).zip(b.iter().map(|b| b - mean_b)) {
        ab += a * b;
        aa += a * a;
        bb += b * b;
    }
    ratio(ab, (aa * bb).sqrt())
}

/// The ranks of values, from 1. Equal values have the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    for equals in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = from as f64 + (equals.len() as f64 + 1.0) / 2.0;
        equals.iter().for_each(|&at| ranks[at] = rank);
        from += equals.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn confusion(classes: usize, pairs: &[(usize, usize)]) -> Confusion {
        let mut confusion = Confusion::new(classes);
        for &(label, predicted) in pairs {
            let scores: Vec<f32> =
                (0..classes).map(|class| if class == predicted { 1.0 } else { 0.0 }).collect();
            confusion.take(label, &scores);
        }
        confusion
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} and {b}");
    }

    /// scikit-learn 1.9.1: accuracy_score, f1_score, matthews_corrcoef.
    #[test]
    fn classes_as_scikit_learn_scores_them() {
        let two = confusion(2, &[(1, 1), (1, 0), (0, 0), (0, 0), (1, 1), (0, 1), (0, 0)]);
        close(two.accuracy(), 5.0 / 7.0);
        close(two.f1(), 2.0 / 3.0);
        close(two.matthews(), 5.0 / 12.0);
        assert_eq!(two.rows().collect::<Vec<_>>(), [[3, 1], [1, 2]]);
        let three = confusion(3, &[(0, 0), (1, 2), (2, 2), (2, 1), (0, 0), (1, 1), (2, 2)]);
        close(three.accuracy(), 5.0 / 7.0);
        close(three.f1(), (1.0 + 0.5 + 2.0 / 3.0) / 3.0);
        close(three.matthews(), (35.0 - 17.0) / (32.0 * 32.0_f64).sqrt());
        close(confusion(2, &[(1, 1), (1, 1)]).matthews(), 0.0);
    }

    /// scikit-learn 1.9.1: accuracy_score and precision_recall_fscore_support, micro and macro,
    /// with zero_division=0.
    #[test]
    fn label_sets_as_scikit_learn_scores_them() {
        let mut counts = LabelCounts::new(3);
        for (known, scores) in [
            ([1.0, 0.0, 0.0], [2.0, -1.0, -3.0]),
            ([1.0, 1.0, 0.0], [-0.5, 0.5, -0.1]),
            ([0.0, 1.0, 0.0], [1.0, 3.0, 0.0]),
            ([0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]),
            ([1.0, 1.0, 0.0], [4.0, -2.0, -1.0]),
        ] {
            counts.take(&known, &scores);
        }
        close(counts.subset_accuracy(), 2.0 / 5.0);
        let all = counts.all();
        close(all.precision(), 4.0 / 5.0);
        close(all.recall(), 4.0 / 6.0);
        close(all.f1(), 8.0 / 11.0);
        close(counts.mean(LabelCount::precision), (2.0 / 3.0 + 1.0) / 3.0);
        close(counts.mean(LabelCount::recall), (2.0 / 3.0 + 2.0 / 3.0) / 3.0);
        close(counts.mean(LabelCount::f1), (2.0 / 3.0 + 4.0 / 5.0) / 3.0);
    }

    /// SciPy 1.17.1: stats.pearsonr, stats.spearmanr.
    #[test]
    fn values_as_scipy_scores_them() {
        let mut agreement = Agreement::default();
        for (label, prediction) in [(1.0, 2.0), (2.0, 2.0), (3.0, 1.0), (4.0, 5.0), (5.0, 4.0)] {
            agreement.take(label, prediction);
        }
        close(agreement.pearson(), 7.0 / (10.0 * 10.8_f64).sqrt());
        close(agreement.spearman(), 5.5 / (10.0 * 9.5_f64).sqrt());
    }
}
