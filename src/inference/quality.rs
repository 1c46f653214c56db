//! How predictions of whole sequences agree with their labels: GLUE's metrics (Wang et al. 2019),
//! defined as scikit-learn and SciPy define them.

/// Of classes, or of values.
#[derive(Clone, Debug, PartialEq)]
pub enum Quality {
    /// One of some classes.
    Classes(Confusion),
    /// A number.
    Values(Agreement),
}

/// How often each class was taken for which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    classes: usize,
    /// (labels, predictions).
    counts: Vec<u64>,
}

/// 0 where there is nothing to divide by.
fn ratio(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

impl Confusion {
    /// Of so many classes, with nothing counted.
    pub fn new(classes: usize) -> Confusion {
        Confusion { classes, counts: vec![0; classes * classes] }
    }

    /// How many there are.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Counts a prediction: the class of the highest score, of equals the first.
    ///
    /// # Panics
    /// The label is none of the classes.
    pub fn take(&mut self, label: usize, scores: &[f32]) {
        let best =
            (1..self.classes).fold(0, |best, at| if scores[at] > scores[best] { at } else { best });
        self.counts[label * self.classes + best] += 1;
    }

    /// By label, how often each class was predicted.
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

    /// The share that is right.
    pub fn accuracy(&self) -> f64 {
        ratio((0..self.classes).map(|class| self.right(class)).sum(), self.all())
    }

    /// The harmonic mean of precision and recall: of two classes that of the second, of more the
    /// mean over all.
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
        let (all, classes) = (self.all(), 0..self.classes);
        let sum = |of: &dyn Fn(usize) -> f64| classes.clone().map(of).sum::<f64>();
        let right = sum(&|class| self.right(class));
        let both = sum(&|class| self.labelled(class) * self.predicted(class));
        let labels = all * all - sum(&|class| self.labelled(class).powi(2));
        let predictions = all * all - sum(&|class| self.predicted(class).powi(2));
        ratio(right * all - both, (labels * predictions).sqrt())
    }
}

/// Values and what was predicted for them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Agreement {
    labels: Vec<f64>,
    predictions: Vec<f64>,
}

impl Agreement {
    /// Takes one.
    pub fn take(&mut self, label: f32, prediction: f32) {
        self.labels.push(f64::from(label));
        self.predictions.push(f64::from(prediction));
    }

    /// The linear correlation (Pearson 1895).
    pub fn pearson(&self) -> f64 {
        correlation(&self.labels, &self.predictions)
    }

    /// The correlation of ranks, equals sharing theirs (Spearman 1904).
    pub fn spearman(&self) -> f64 {
        correlation(&ranks(&self.labels), &ranks(&self.predictions))
    }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |values: &[f64]| ratio(values.iter().sum(), values.len() as f64);
    let (mean_a, mean_b) = (mean(a), mean(b));
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a - mean_a, b - mean_b);
        (ab, aa, bb) = (ab + a * b, aa + a * a, bb + b * b);
    }
    ratio(ab, (aa * bb).sqrt())
}

/// From 1 on, equals sharing the mean of theirs.
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
