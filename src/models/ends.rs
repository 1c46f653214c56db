//! What stands before the first block and behind the last.

use super::layer::{Backward, Forward, Init, Kind, Layer, Save, Tensor, tensor_views};
use super::shape::Shape;
use crate::kernels::BatchView;
use crate::kernels::{Activation, Kernels, Linear, Norm, Rows};
use crate::tensor::Scratch;
use crate::tensor::{Dtype, View};

fn norm_of(shape: &Shape, rows: Rows) -> Norm {
    let Shape { hidden: channels, norm_epsilon: epsilon, rms_norm: rms, .. } = *shape;
    Norm { rows: rows.count(), channels, epsilon, rms }
}

/// A norm's scale and, by its kind, shift.
fn norm_tensors(name: &str, shape: &Shape) -> Vec<Tensor> {
    let named = |part: &str, init| Tensor {
        name: format!("{name}.{part}"),
        shape: vec![shape.hidden],
        kind: Kind::Norm,
        init,
        joined: false,
    };
    let shift = (!shape.rms_norm).then(|| named("bias", Init::Zeros));
    [named("weight", Init::Ones)].into_iter().chain(shift).collect()
}

/// Adds positions and kinds of tokens, and norms, where a family has them: what stands between the
/// embedding and the first block.
#[derive(Clone, Debug)]
pub struct Stem {
    /// The layer's index, for dropout.
    pub index: u32,
    /// The model.
    pub shape: Shape,
}

/// Its tensors, or their gradients.
struct StemParts {
    /// From the first position on.
    positions: Option<View>,
    kinds: Option<View>,
    norm: Option<(View, Option<View>)>,
}

impl Stem {
    /// True when a family has such a layer.
    pub fn is_in(shape: &Shape) -> bool {
        let drops = shape.dropout.embedding > 0.0;
        shape.learned_positions.is_some() || shape.token_types > 0 || drops
    }

    fn has_norm(&self) -> bool {
        !self.shape.names.stem_norm.is_empty()
    }

    fn parts(&self, block: View) -> StemParts {
        let Shape { hidden, positions, learned_positions, token_types, rms_norm, .. } = self.shape;
        let mut views = tensor_views(&self.tensors(), block).into_iter();
        let mut next = || views.next().expect("as `tensors` lists them");
        StemParts {
            positions: learned_positions
                .map(|before| next().part(before * hidden..(before + positions) * hidden)),
            kinds: (token_types > 0).then(&mut next),
            norm: self.has_norm().then(|| (next(), (!rms_norm).then(&mut next))),
        }
    }
}

impl Layer for Stem {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, positions, hidden, initializer_range, token_types, .. } = self.shape;
        let table = |name: &str, rows: usize| Tensor {
            name: name.into(),
            shape: vec![rows, hidden],
            kind: Kind::Weight,
            init: Init::Normal(initializer_range),
            joined: false,
        };
        let before = self.shape.learned_positions;
        let mut all = Vec::new();
        all.extend(before.map(|before| table(names.positions, before + positions)));
        all.extend((token_types > 0).then(|| table(names.token_types, token_types)));
        if self.has_norm() {
            all.extend(norm_tensors(names.stem_norm, &self.shape));
        }
        all
    }

    fn products(&self) -> usize {
        0
    }

    fn saved_len(&self, _positions: usize, _keep: Save, _of: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, weights, x, y, scratch, .. } = *pass;
        let w = self.parts(weights);
        let sum = if w.norm.is_some() { scratch.take(y.len()) } else { y };
        self.sum(k, &w, sum, x, &batch);
        if let Some((gamma, beta)) = w.norm {
            let statistics = scratch.take_floats(2 * batch.rows.count());
            k.norm(y, statistics, sum, gamma, beta, norm_of(&self.shape, batch.rows));
        }
        let dropout = batch.dropout(self.shape.dropout.embedding, self.index, 0);
        if dropout.is_some() {
            k.dropped(y, y, batch.rows, dropout);
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, weights, gradient, accumulate, x, dy, dx, scratch, .. } = *pass;
        let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len()));
        let (w, d) = (self.parts(weights), self.parts(gradient));
        let dropout = batch.dropout(self.shape.dropout.embedding, self.index, 0);
        let dx = dx.unwrap_or_else(|| scratch.take(dy.len()));
        match (w.norm, d.norm) {
            (Some((gamma, beta)), Some((dgamma, dbeta))) => {
                let (sum, y, dsum) =
                    (scratch.take(x.len()), scratch.take(x.len()), scratch.take(x.len()));
                let statistics = scratch.take_floats(2 * batch.rows.count());
                let size = norm_of(&self.shape, batch.rows);
                self.sum(k, &w, sum, x, &batch);
                k.norm(y, statistics, sum, gamma, beta, size);
                k.dropped(dsum, dy, batch.rows, dropout);
                k.norm_backward(
                    dx, dgamma, dbeta, None, dsum, sum, statistics, gamma, size, accumulate,
                    scratch,
                );
            }
            _ => k.dropped(dx, dy, batch.rows, dropout),
        }
        if let (Some(whole), Some(before)) = (d.positions, self.shape.learned_positions) {
            // Rows before the first position are nobody's.
            let rows = tensor_views(&self.tensors(), gradient)[0];
            if before > 0 && !accumulate {
                k.clear(rows.part(0..before * self.shape.hidden));
            }
            k.add_positions_backward(whole, dx, batch.places(), accumulate);
        }
        if let Some(kinds) = d.kinds {
            k.add_types_backward(kinds, dx, batch.kinds, accumulate, scratch);
        }
    }
}

impl Stem {
    /// The sum of the three.
    fn sum(&self, k: &dyn Kernels, w: &StemParts, y: View, x: View, batch: &BatchView<'_>) {
        match w.positions {
            Some(table) => k.add_positions(y, x, table, batch.places()),
            None => k.dropped(y, x, batch.rows, None),
        }
        if let Some(table) = w.kinds {
            k.add_types(y, table, batch.kinds);
        }
    }
}

/// The norm in front of the head, or the head's transform.
#[derive(Clone, Debug)]
pub struct Final {
    /// The model.
    pub shape: Shape,
}

impl Final {
    /// True when a family has such a layer.
    pub fn is_in(shape: &Shape) -> bool {
        shape.masked_head() || !shape.names.final_norm.is_empty()
    }

    fn linear(&self, rows: Rows) -> Linear {
        let Shape { hidden, transposed, .. } = self.shape;
        Linear { rows: rows.count(), inputs: hidden, outputs: hidden, transposed }
    }

    /// The transform's curve.
    fn curve(&self) -> Activation {
        self.shape.names.transform_activation.unwrap_or(self.shape.activation)
    }

    /// What the norm reads: x, or its transform, with the transform's sum before the curve.
    fn before_norm(
        &self,
        k: &dyn Kernels,
        views: &[View],
        x: View,
        rows: Rows,
        scratch: &Scratch<'_>,
    ) -> (View, Option<View>) {
        if !self.shape.masked_head() {
            return (x, None);
        }
        let (sum, bent) = (scratch.take(x.len()), scratch.take(x.len()));
        k.linear(sum, x, views[0], Some(views[1]), self.linear(rows));
        k.activate(bent, sum, self.curve());
        (bent, Some(sum))
    }

    /// Where the norm's tensors begin among the views.
    fn norm_at(&self) -> usize {
        if self.shape.masked_head() { 2 } else { 0 }
    }
}

impl Layer for Final {
    fn tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, initializer_range, .. } = self.shape;
        if !self.shape.masked_head() {
            return norm_tensors(names.final_norm, &self.shape);
        }
        let part = |name: &str, shape: Vec<usize>, kind, init| Tensor {
            name: format!("{}.{name}", names.transform),
            shape,
            kind,
            init,
            joined: false,
        };
        let mut all = vec![
            part("weight", vec![c, c], Kind::Weight, Init::Normal(initializer_range)),
            part("bias", vec![c], Kind::Bias, Init::Zeros),
        ];
        all.extend(norm_tensors(names.transform_norm, &self.shape));
        all
    }

    fn takes_floats(&self) -> bool {
        true
    }

    fn saved_len(&self, _positions: usize, _keep: Save, _of: Dtype) -> usize {
        0
    }

    fn forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { ref batch, weights, x, y, scratch, .. } = *pass;
        let views = tensor_views(&self.tensors(), weights);
        let (gamma, beta) = (views[self.norm_at()], views.get(self.norm_at() + 1).copied());
        for chunk in batch.chunks(true) {
            let (scratch, rows) = (&scratch.nested(), chunk.batch(batch).rows);
            let [x, y] = [x, y].map(|view| chunk.of(view, self.shape.hidden));
            let (read, _) = self.before_norm(k, &views, x, rows, scratch);
            let statistics = scratch.take_floats(2 * rows.count());
            k.norm(y, statistics, read, gamma, beta, norm_of(&self.shape, rows));
        }
    }

    fn backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { ref batch, weights, gradient, mut accumulate, x, dy, dx, .. } = *pass;
        let (scratch, c) = (pass.scratch, self.shape.hidden);
        let views = tensor_views(&self.tensors(), weights);
        let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len()));
        let d = tensor_views(&self.tensors(), gradient);
        for chunk in batch.chunks(true) {
            let (scratch, rows) = (&scratch.nested(), chunk.batch(batch).rows);
            let dx = dx.map(|dx| chunk.of(dx, c));
            let dx = dx.unwrap_or_else(|| scratch.take(rows.count() * c));
            let [x, mut dy] = [x, dy].map(|view| chunk.of(view, c));
            if dy.dtype != x.dtype {
                let floats = dy;
                dy = scratch.take(floats.len());
                k.cast(dy, floats);
            }
            self.backward_of(k, [&views, &d], [x, dy, dx], rows, accumulate, scratch);
            accumulate = true;
        }
    }
}

impl Final {
    /// Of one chunk: x, dy and dx are its own. The tensors and their gradients.
    fn backward_of(
        &self,
        k: &dyn Kernels,
        [views, d]: [&[View]; 2],
        [x, dy, dx]: [View; 3],
        rows: Rows,
        accumulate: bool,
        scratch: &Scratch<'_>,
    ) {
        let (y, statistics) = (scratch.take(dy.len()), scratch.take_floats(2 * rows.count()));
        let (norm, at) = (norm_of(&self.shape, rows), self.norm_at());
        let (gamma, beta) = (views[at], views.get(at + 1).copied());
        let (dgamma, dbeta) = (d[at], d.get(at + 1).copied());
        let (read, sum) = self.before_norm(k, views, x, rows, scratch);
        k.norm(y, statistics, read, gamma, beta, norm);
        let dread = if sum.is_some() { scratch.take(dy.len()) } else { dx };
        k.norm_backward(
            dread, dgamma, dbeta, None, dy, read, statistics, gamma, norm, accumulate, scratch,
        );
        if let Some(sum) = sum {
            k.activate_backward(dread, sum, self.curve());
            let size = self.linear(rows);
            k.linear_backward(dx, d[0], Some(d[1]), dread, x, views[0], size, accumulate, scratch);
        }
    }
}
