//! Scores of tokens, a tile of the vocabulary at a time.
//!
//! Each tile is added to the statistics of each labelled position: running maximum, sum, target's
//! logit, label. So logits exist for a few positions and one tile at a time.

use super::loss::{Loss, Smoothing};
use super::operation::{KernelOperation, Views};
use crate::tensor::{Dtype, View};

/// Floats of a position's head statistics: running maximum, sum, target's logit, label.
pub const STATISTICS: usize = 4;

/// The label in a position's statistics: the fourth float holds its bits. Negative: no label.
pub fn label_of(statistics: &[f32]) -> i32 {
    statistics[3].to_bits() as i32
}

/// How logits are made of the products of a head's input and weights. With a form other than the
/// plain one, a head has no bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitForm {
    /// The factor of products.
    pub scale: f32,
    /// The limit of what is scaled: a logit l becomes cap tanh(l ÷ cap).
    pub cap: Option<f32>,
}

impl LogitForm {
    /// Logits are products.
    pub const PLAIN: LogitForm = LogitForm { scale: 1.0, cap: None };

    fn fits(self, bias: Option<View>) -> bool {
        self == LogitForm::PLAIN || bias.is_none()
    }
}

/// Adds a tile of the vocabulary to the statistics of each labelled position.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    /// Output: floats. (R, 4).
    pub out: View,
    /// Statistics over the earlier tiles: floats. (R, 4).
    pub statistics: View,
    /// The head's input. (R, C).
    pub h: View,
    /// The tile's weights. (V, C).
    pub w: View,
    /// (1, V).
    pub bias: Option<View>,
    /// The tile's first row in the vocabulary.
    pub first: usize,
    /// The number of positions with a label.
    pub labelled: usize,
    /// Label smoothing.
    pub smoothing: Smoothing,
    /// How logits are made.
    pub form: LogitForm,
}

/// Computes the logits of the labelled positions, in order.
#[derive(Clone, Copy, Debug)]
pub struct Logits {
    /// Output: floats. (labelled positions, V).
    pub y: View,
    /// Floats. (R, 4).
    pub statistics: View,
    /// The head's input. (R, C).
    pub h: View,
    /// The tile's weights. (V, C).
    pub w: View,
    /// (1, V).
    pub bias: Option<View>,
    /// How logits are made.
    pub form: LogitForm,
}

/// dh = `dh_before` (or 0) + scale · d w, dw (+)= scale · dᵀ h. d is the gradient of the loss with
/// respect to the logits, which follows from complete statistics.
#[derive(Clone, Copy)]
pub struct ScoreBackward<'a> {
    /// Output: floats. (R, C).
    pub dh: View,
    /// Floats; `None`: the tile is frozen. (V, C).
    pub dw: Option<View>,
    /// Floats. (1, V).
    pub dbias: Option<View>,
    /// The sum over the tiles that came before; `None`: this is the first tile. (R, C).
    pub dh_before: Option<View>,
    /// Complete statistics: floats. (R, 4).
    pub statistics: View,
    /// The head's input in the forward pass. (R, C).
    pub h: View,
    /// The tile's weights. (V, C).
    pub w: View,
    /// (1, V).
    pub bias: Option<View>,
    /// The loss of a position.
    pub loss: &'a dyn Loss,
    /// True if the statistics are weighed: their third float is the weight of the row, a factor of
    /// the gradient of its cross entropy. Then `loss` and `smoothing` have no effect.
    pub weighed: bool,
    /// As in [`Score`].
    pub smoothing: Smoothing,
    /// How logits are made.
    pub form: LogitForm,
    /// A factor.
    pub scale: f32,
    /// The tile's first row in the vocabulary.
    pub first: usize,
    /// The number of positions with a label.
    pub labelled: usize,
    /// True when `dw` and `dbias` are added to; false when they are replaced.
    pub accumulate: bool,
}

/// Declares the views that every operation of a tile reads.
fn reads_tile(
    views: &mut Views<'_>,
    [statistics, h, w]: [View; 3],
    bias: Option<View>,
    form: LogitForm,
) {
    views.rule(form.fits(bias), "logits of another form than the plain one have no bias");
    views.reads("statistics", statistics, [h.rows, STATISTICS], Dtype::F32);
    views.reads("h", h, h.shape(), h.dtype);
    views.reads("w", w, [w.rows, h.columns], h.dtype);
    views.reads("bias", bias, [1, w.rows], h.dtype);
}

impl KernelOperation for Score {
    fn views(&self, views: &mut Views<'_>) {
        let Score { out, statistics, h, w, bias, form, .. } = *self;
        // Each row of them holds a label, which is no number.
        views.writes_opaque("out", out, [h.rows, STATISTICS], Dtype::F32);
        reads_tile(views, [statistics, h, w], bias, form);
    }
}

impl KernelOperation for Logits {
    fn views(&self, views: &mut Views<'_>) {
        let Logits { y, statistics, h, w, bias, form } = *self;
        views.writes("y", y, [y.rows, w.rows], Dtype::F32);
        reads_tile(views, [statistics, h, w], bias, form);
    }
}

impl KernelOperation for ScoreBackward<'_> {
    fn views(&self, views: &mut Views<'_>) {
        let ScoreBackward { dh, dw, dbias, dh_before, statistics, h, w, bias, form, .. } = *self;
        views.writes("dh", dh, h.shape(), Dtype::F32);
        views.writes("dw", dw, w.shape(), Dtype::F32);
        views.writes("dbias", dbias, [1, w.rows], Dtype::F32);
        views.reads("dh_before", dh_before, h.shape(), Dtype::F32);
        reads_tile(views, [statistics, h, w], bias, form);
    }
}
