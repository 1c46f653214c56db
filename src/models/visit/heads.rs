//! Visits to heads: tiles of the vocabulary, and classes.

use l2l_actors::schedule::Role;

use super::{Part, VisitArgs, VisitRun, given};
use crate::kernels::{Cast, Logits, Score, ScoreBackward, Smoothing};
use crate::models::{Classes, ClassesBackward, ClassesForward, Tile};
use crate::tensor::View;

impl VisitRun<'_> {
    /// The place for the gradient of a head's input: in workspace, if no layer below needs it.
    fn head_gradient(&self, part: &Part<'_>) -> View {
        part.ports.written(Role::HeadGradient).unwrap_or_else(|| {
            let dtype = self.model.head_gradient(self.args.dtype);
            let rows = part.batch.rows();
            let columns = self.model.shape.hidden;
            part.scratch.take_floats(1, dtype.floats(rows * columns)).hold(rows, columns, dtype)
        })
    }

    pub(super) fn classes_forward(&self, classes: &Classes, part: &Part<'_>) {
        let pass = ClassesForward {
            out: given(part.ports.written(Role::Statistics)),
            scores: part.ports.written(Role::Logits),
            batch: part.batch,
            weights: &self.weights,
            statistics: part.read(Role::Statistics),
            h: part.read(Role::Hidden),
            smoothing: self.smoothing(classes.labels()),
            weighed: self.model.objective.is_some(),
        };
        classes.forward(self.k, &pass, &part.scratch);
    }

    pub(super) fn classes_backward(&self, classes: &Classes, part: &Part<'_>) {
        if part.ports.written(Role::Statistics).is_some() {
            self.classes_forward(classes, part);
        }
        let pass = ClassesBackward {
            gradients: &self.gradients,
            dh: self.head_gradient(part),
            batch: part.batch,
            weights: &self.weights,
            statistics: complete_statistics(part),
            h: part.read(Role::Hidden),
            smoothing: self.smoothing(classes.labels()),
            weighed: self.model.objective.is_some(),
            scale: self.args.scale,
            accumulate: part.accumulate,
        };
        classes.backward(self.k, &pass, &part.scratch);
    }

    /// The rows of a part that have a label.
    fn labelled(&self, part: &Part<'_>) -> usize {
        let targets = &self.args.targets[part.ports.rows()];
        targets.iter().filter(|target| **target >= 0).count()
    }

    /// The arguments of a tile's score.
    fn score(&self, tile: Tile, part: &Part<'_>) -> Score {
        Score {
            out: given(part.ports.written(Role::Statistics)),
            statistics: part.read(Role::Statistics),
            h: part.read(Role::Hidden),
            w: self.weights[0],
            bias: self.weights.get(1).copied(),
            first: tile.first,
            labelled: self.labelled(part),
            smoothing: self.smoothing(self.model.shape.vocabulary),
            form: self.model.shape.logits,
        }
    }

    /// Labels are smoothed in training alone.
    fn smoothing(&self, classes: usize) -> Smoothing {
        match self.model.label_smoothing {
            epsilon if epsilon > 0.0 && self.args.batch.trains() => Smoothing::of(epsilon, classes),
            _ => Smoothing::NONE,
        }
    }

    pub(super) fn tile_forward(&self, tile: Tile, part: &Part<'_>) {
        let score = self.score(tile, part);
        let Score { out, statistics, h, w, bias, labelled, form, .. } = score;
        let Some(y) = part.ports.written(Role::Logits) else {
            return self.k.score(&score, &part.scratch);
        };
        // The one position of a sequence that is scored is in one of its chunks.
        if labelled > 0 {
            self.k.logits(&Logits { y, statistics, h, w, bias, form }, &part.scratch);
        }
        self.k.cast(&Cast { y: out, x: statistics });
    }

    pub(super) fn tile_backward(&self, tile: Tile, part: &Part<'_>) {
        let VisitArgs { scale, .. } = *self.args;
        let op = ScoreBackward {
            dh: self.head_gradient(part),
            dw: self.gradients[0],
            dbias: self.gradients.get(1).copied().flatten(),
            dh_before: part.ports.read(Role::HeadGradient),
            statistics: complete_statistics(part),
            h: part.read(Role::Hidden),
            w: self.weights[0],
            bias: self.weights.get(1).copied(),
            loss: &*self.model.loss,
            weighed: self.model.objective.is_some(),
            smoothing: self.smoothing(self.model.shape.vocabulary),
            form: self.model.shape.logits,
            scale,
            first: tile.first,
            labelled: self.labelled(part),
            accumulate: part.accumulate,
        };
        match part.ports.written(Role::Statistics) {
            Some(_) => self.k.score_and_backward(&self.score(tile, part), &op, &part.scratch),
            None => self.k.score_backward(&op, &part.scratch),
        }
    }
}

/// The statistics over the whole head, for its backward. This visit or an earlier one completes
/// them.
fn complete_statistics(part: &Part<'_>) -> View {
    let completed = part.ports.written(Role::Statistics);
    completed.unwrap_or_else(|| part.read(Role::Statistics))
}
