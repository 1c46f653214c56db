//! Further numbers of records, which a run reports beside the loss.

/// The most numbers of a record.
pub(crate) const MOST_METRICS: usize = 8;

/// The means over records of an objective's [metrics](super::Objective::metrics).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ObjectiveMetrics {
    names: &'static [&'static str],
    means: [f64; MOST_METRICS],
}

impl ObjectiveMetrics {
    /// Metrics of these names, of no record: all are 0.
    pub(crate) fn named(names: &'static [&'static str]) -> ObjectiveMetrics {
        ObjectiveMetrics { names, ..ObjectiveMetrics::default() }
    }

    /// The means of the numbers of some records: (records, names).
    pub(crate) fn of_records(names: &'static [&'static str], numbers: &[f64]) -> ObjectiveMetrics {
        let mut all = ObjectiveMetrics::named(names);
        let each = names.len().max(1);
        let records = (numbers.len() / each).max(1) as f64;
        numbers.chunks_exact(each).for_each(|of_record| all.sum(of_record, 1.0));
        all.scale(1.0 / records);
        all
    }

    /// Adds numbers, each times `weight`.
    pub(crate) fn sum(&mut self, numbers: &[f64], weight: f64) {
        self.means.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number * weight);
    }

    /// Multiplies all numbers.
    pub(crate) fn scale(&mut self, by: f64) {
        self.means.iter_mut().for_each(|mean| *mean *= by);
    }

    /// The means without their names, in the objective's order, and zeros behind them.
    pub(crate) fn means(&self) -> &[f64; MOST_METRICS] {
        &self.means
    }

    /// The name and the mean of each metric, in the objective's order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.names.iter().copied().zip(self.means)
    }

    /// The mean of the metric of this name.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.iter().find(|(of, _)| *of == name).map(|(_, mean)| mean)
    }
}
