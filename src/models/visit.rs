//! One micro-batch at one visit: which views are the inputs and outputs of the visited layer.

use l2l_actors::schedule::{Phase, Role, Visit};

use crate::kernels::{
    BatchMetadata, BatchView, Cast, Dequantise, DropoutKey, Kernels, Logits, Rows, STATISTICS,
    Score, ScoreBackward, Smoothing,
};
use crate::models::{
    Backward, BlockTensors, Classes, ClassesBackward, ClassesForward, Forward, KvCache, Layer,
    Model, Part, Save, SlotWeight, Tile,
};
use crate::tensor::{Dtype, Scratch, View};

/// The arguments of a visit for one micro-batch.
pub(crate) struct VisitArgs<'a> {
    pub(crate) batch: BatchView<'a>,
    /// Its positions that have a label.
    pub(crate) labelled: usize,
    /// The dtype of weights and activations.
    pub(crate) dtype: Dtype,
    /// The block's weight slot, in floats whatever it holds.
    pub(crate) weights: View,
    pub(crate) gradient: Option<View>,
    /// Whether the gradient is added to what the accumulator holds, or replaces it.
    pub(crate) accumulate: bool,
    /// Boundaries that the visit reads, and those that it writes.
    pub(crate) reads: BoundaryViews,
    pub(crate) writes: BoundaryViews,
    /// 1 ÷ labelled positions of the step.
    pub(crate) scale: f32,
    /// Which activations are saved, if any are.
    pub(crate) save: Save,
    pub(crate) workspace: View,
    /// What the chunks of a long sequence leave to each other.
    pub(crate) chunk_state: View,
}

/// A slot for each role of boundaries that a visit has, in floats whatever it holds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BoundaryViews {
    pub(crate) hidden: Option<View>,
    pub(crate) hidden_gradient: Option<View>,
    pub(crate) saved_activations: Option<View>,
    pub(crate) statistics: Option<View>,
    pub(crate) head_gradient: Option<View>,
    pub(crate) logits: Option<View>,
    pub(crate) cached_kv: Option<View>,
    pub(crate) new_kv: Option<View>,
}

impl FromIterator<(Role, View)> for BoundaryViews {
    fn from_iter<I: IntoIterator<Item = (Role, View)>>(boundaries: I) -> BoundaryViews {
        let mut views = BoundaryViews::default();
        for (role, view) in boundaries {
            let place = match role {
                Role::Hidden => &mut views.hidden,
                Role::HiddenGradient => &mut views.hidden_gradient,
                Role::SavedActivations => &mut views.saved_activations,
                Role::Statistics => &mut views.statistics,
                Role::HeadGradient => &mut views.head_gradient,
                Role::Logits => &mut views.logits,
                Role::CachedKv => &mut views.cached_kv,
                Role::NewKv => &mut views.new_kv,
            };
            *place = Some(view);
        }
        views
    }
}

/// A boundary that the schedule gives every visit of this kind.
fn given(view: Option<View>) -> View {
    view.expect("the schedule gives each visit the boundaries of its kind")
}

/// Runs the visited layer. Returns the most floats of workspace that were in use at once.
pub(crate) fn run(
    model: &Model,
    visit: &Visit,
    kernels: &dyn Kernels,
    args: &VisitArgs<'_>,
) -> usize {
    let backward = visit.phase.is_backward();
    VisitRun::new(model, visit.layer.0 as usize, kernels, args).run(backward)
}

/// A visit while it runs.
struct VisitRun<'r> {
    model: &'r Model,
    layer: usize,
    k: &'r dyn Kernels,
    args: &'r VisitArgs<'r>,
    scratch: Scratch<'static>,
    /// Views of the layer's weights, in the device's dtype.
    weights: Vec<View>,
}

impl<'r> VisitRun<'r> {
    fn new(
        model: &'r Model,
        layer: usize,
        k: &'r dyn Kernels,
        args: &'r VisitArgs<'r>,
    ) -> VisitRun<'r> {
        let scratch = Scratch::new(args.workspace, args.dtype);
        VisitRun { model, layer, k, args, scratch, weights: Vec::new() }
    }

    fn run(mut self, backward: bool) -> usize {
        let weights = self.tensors().weights(self.args.weights, self.args.dtype).into_iter();
        self.weights = weights.map(|weight| self.ready(weight)).collect();
        match (&self.model.parts[self.layer], backward) {
            (Part::Embedding, _) => unreachable!("the embedding is visited on the host"),
            (Part::Stack(layer), false) => self.layer_forward(&**layer),
            (Part::Stack(layer), true) => self.layer_backward(&**layer),
            (Part::Classes(classes), false) => self.classes_forward(classes),
            (Part::Classes(classes), true) => self.classes_backward(classes),
            (&Part::Head(tile), false) => self.tile_forward(tile),
            (&Part::Head(tile), true) => self.tile_backward(tile),
        }
        self.scratch.peak()
    }

    /// The hidden states, or their gradient, that a slot holds. (R, C).
    fn hidden(&self, slot: View, dtype: Dtype) -> View {
        slot.hold(self.args.batch.rows(), self.model.shape.hidden, dtype)
    }

    /// The keys and values that a slot holds. (positions, 2 K D).
    fn kv(&self, slot: View, width: usize) -> View {
        let elements = Dtype::F32.size() * slot.len() / self.args.dtype.size();
        slot.hold(elements / width, width, self.args.dtype)
    }

    /// The head's statistics that a slot holds. (R, 4).
    fn statistics(&self, slot: View) -> View {
        slot.with_columns(STATISTICS)
    }

    /// The hidden states that the visit reads.
    fn x(&self) -> View {
        self.hidden(given(self.args.reads.hidden), self.args.dtype)
    }

    /// The gradient that a head's visit writes: in workspace, where nobody reads it.
    fn head_gradient(&self) -> View {
        let dtype = self.model.head_gradient(self.args.dtype);
        match self.args.writes.head_gradient {
            Some(slot) => self.hidden(slot, dtype),
            None => {
                let [rows, columns] = [self.args.batch.rows(), self.model.shape.hidden];
                self.scratch.take_floats(1, dtype.floats(rows * columns)).hold(rows, columns, dtype)
            }
        }
    }

    /// The tensors of the layer's block.
    fn tensors(&self) -> &'r BlockTensors {
        &self.model.blocks[self.model.part_blocks[self.layer][0].0 as usize]
    }

    /// A weight in the device's dtype: where it lies, or in workspace.
    fn ready(&self, weight: SlotWeight<'_>) -> View {
        let stored = match weight {
            SlotWeight::Ready(view) => return view,
            SlotWeight::Stored(stored) => stored,
        };
        let [rows, columns] = stored.shape();
        let y = self.scratch.take(rows, columns);
        for (rows, x, quantisation) in stored.quantised() {
            self.k.dequantise(&Dequantise { y: y.row_range(rows), x, quantisation });
        }
        y
    }

    /// Views of the gradients of those that are trained.
    fn gradients(&self) -> Vec<Option<View>> {
        self.tensors().gradients(self.args.gradient)
    }

    fn layer_forward(&self, layer: &dyn Layer) {
        let VisitArgs { batch, dtype, reads, writes, save, chunk_state, .. } = *self.args;
        let kv = |slot: View| self.kv(slot, layer.kv_width());
        let new_kv = writes.new_kv.map(kv);
        let pass = Forward {
            batch,
            weights: &self.weights,
            x: self.x(),
            y: self.hidden(given(writes.hidden), dtype),
            saved: writes.saved_activations.map(|view| (save, view)),
            kv_cache: new_kv.map(|new| KvCache { new, cached: reads.cached_kv.map(kv) }),
            chunk_state,
            scratch: &self.scratch,
        };
        layer.forward(self.k, &pass);
    }

    fn layer_backward(&self, layer: &dyn Layer) {
        let VisitArgs { batch, dtype, accumulate, reads, writes, .. } = *self.args;
        let VisitArgs { save, chunk_state, .. } = *self.args;
        let dy = match reads.head_gradient {
            Some(slot) => self.head_gradient_for(layer, slot),
            None => self.hidden(given(reads.hidden_gradient), dtype),
        };
        let pass = Backward {
            batch,
            weights: &self.weights,
            gradients: &self.gradients(),
            accumulate,
            x: self.x(),
            saved: reads.saved_activations.map(|view| (save, view)),
            dy,
            dx: writes.hidden_gradient.map(|slot| self.hidden(slot, dtype)),
            chunk_state,
            scratch: &self.scratch,
        };
        layer.backward(self.k, &pass);
    }

    /// The gradient that a head hands to this layer: cast to the device's dtype, unless it is of
    /// that dtype or the layer takes floats.
    fn head_gradient_for(&self, layer: &dyn Layer, slot: View) -> View {
        let dtype = self.model.head_gradient(self.args.dtype);
        let dy = self.hidden(slot, dtype);
        if dtype == self.args.dtype || layer.takes_floats() {
            return dy;
        }
        let cast = self.scratch.take_like(dy);
        self.k.cast(&Cast { y: cast, x: dy });
        cast
    }

    fn classes_forward(&self, classes: &Classes) {
        let VisitArgs { batch, reads, writes, .. } = *self.args;
        let samples = classes.samples().of(&batch);
        let scores = |slot: View| slot.with_columns(slot.len() / samples);
        let pass = ClassesForward {
            out: self.statistics(given(writes.statistics)),
            scores: writes.logits.map(scores),
            batch,
            weights: &self.weights,
            statistics: self.statistics(given(reads.statistics)),
            h: self.x(),
            smoothing: self.smoothing(classes.labels()),
        };
        classes.forward(self.k, &pass, &self.scratch);
    }

    /// The statistics over the whole head, for its backward: those that this visit completes, or
    /// those that a visit before it completed.
    fn complete_statistics(&self) -> View {
        let VisitArgs { reads, writes, .. } = *self.args;
        self.statistics(given(writes.statistics.or(reads.statistics)))
    }

    fn classes_backward(&self, classes: &Classes) {
        let VisitArgs { batch, writes, .. } = *self.args;
        if writes.statistics.is_some() {
            self.classes_forward(classes);
        }
        let pass = ClassesBackward {
            gradients: &self.gradients(),
            dh: self.head_gradient(),
            batch,
            weights: &self.weights,
            statistics: self.complete_statistics(),
            h: self.x(),
            smoothing: self.smoothing(classes.labels()),
            scale: self.args.scale,
            accumulate: self.args.accumulate,
        };
        classes.backward(self.k, &pass, &self.scratch);
    }

    /// A tile's score.
    fn score(&self, tile: Tile) -> Score {
        let VisitArgs { labelled, reads, writes, .. } = *self.args;
        let weights = &self.weights;
        Score {
            out: self.statistics(given(writes.statistics)),
            statistics: self.statistics(given(reads.statistics)),
            h: self.x(),
            w: weights[0],
            bias: weights.get(1).copied(),
            first: tile.first,
            labelled,
            smoothing: self.smoothing(self.model.shape.vocabulary),
        }
    }

    /// Labels are smoothed in training alone.
    fn smoothing(&self, classes: usize) -> Smoothing {
        match self.model.label_smoothing {
            epsilon if epsilon > 0.0 && self.args.batch.trains() => Smoothing::of(epsilon, classes),
            _ => Smoothing::NONE,
        }
    }

    fn tile_forward(&self, tile: Tile) {
        let score = self.score(tile);
        let Score { out, statistics, h, w, bias, .. } = score;
        if let Some(logits) = self.args.writes.logits {
            let y = logits.with_columns(tile.rows);
            self.k.logits(&Logits { y, statistics, h, w, bias }, &self.scratch);
            self.k.cast(&Cast { y: out, x: statistics });
        } else {
            self.k.score(&score, &self.scratch);
        }
    }

    fn tile_backward(&self, tile: Tile) {
        let VisitArgs { dtype, labelled, accumulate, scale, .. } = *self.args;
        let VisitArgs { reads, writes, .. } = *self.args;
        let head_gradient = self.model.head_gradient(dtype);
        let (weights, gradients) = (&self.weights, self.gradients());
        let op = ScoreBackward {
            dh: self.head_gradient(),
            dw: gradients[0],
            dbias: gradients.get(1).copied().flatten(),
            dh_before: reads.head_gradient.map(|slot| self.hidden(slot, head_gradient)),
            statistics: self.complete_statistics(),
            h: self.x(),
            w: weights[0],
            bias: weights.get(1).copied(),
            loss: &*self.model.loss,
            smoothing: self.smoothing(self.model.shape.vocabulary),
            scale,
            first: tile.first,
            labelled,
            accumulate,
        };
        match writes.statistics {
            Some(_) => self.k.score_and_backward(&self.score(tile), &op, &self.scratch),
            None => self.k.score_backward(&op, &self.scratch),
        }
    }
}

/// What workspace is measured for.
#[derive(Clone, Copy)]
struct Measure<'m> {
    kernels: &'m dyn Kernels,
    dtype: Dtype,
    model: &'m Model,
    save: Option<Save>,
}

/// Floats of workspace that one micro-batch of at most so many positions needs. The chunks of a
/// sequence that is cut may need less than the longest sequence that is not. `kernels` have no
/// memory; `phases`: those of its visits.
pub(crate) fn workspace(
    kernels: &dyn Kernels,
    dtype: Dtype,
    model: &Model,
    sequences: usize,
    positions: usize,
    save: Option<Save>,
    phases: &[Phase],
) -> usize {
    let measure = Measure { kernels, dtype, model, save };
    let needs = [positions, positions.min(model.shape.chunk_positions)]
        .map(|positions| measure.workspace(Rows { sequences, positions }, phases));
    needs[0].max(needs[1])
}

impl Measure<'_> {
    /// Walks every layer in every phase on a device without memory.
    fn workspace(&self, rows: Rows, phases: &[Phase]) -> usize {
        let (starts, kinds) = (rows.starts(), vec![0; rows.count()]);
        let batch = BatchMetadata {
            starts: &starts,
            kinds: &kinds,
            documents: &[],
            cached: &[],
            dropout_key: Some(DropoutKey { seed: 0, step: 0, first_sequence: 0 }),
        };
        let layers = 0..self.model.parts.len();
        // A frozen layer computes no gradients of weights, as a part of a backward pass does.
        let has_parts = phases.contains(&Phase::Weights);
        let has_phase = |&(layer, phase): &(usize, Phase)| match &self.model.parts[layer] {
            Part::Stack(layer) => phase != Phase::Inputs || has_parts || layer.is_optional(),
            _ => !matches!(phase, Phase::Inputs | Phase::Weights),
        };
        let visits = layers.flat_map(|layer| phases.iter().map(move |&phase| (layer, phase)));
        let visits = visits.filter(has_phase);
        let needs = visits.flat_map(|(layer, phase)| {
            let hands_on = if self.ends_above_embedding() { &[true, false][..] } else { &[true] };
            hands_on.iter().map(move |&hands_on| (layer, phase, hands_on))
        });
        let needs =
            needs.map(|(layer, phase, hands_on)| self.visit(batch.view(), layer, phase, hands_on));
        needs.max().unwrap_or(0)
    }

    /// True for the layer below the head.
    fn is_last(&self, layer: usize) -> bool {
        self.model.parts.get(layer + 1).is_some_and(Part::is_head)
    }

    /// Whether a backward pass may end above the embedding, at a layer that hands no gradient on.
    fn ends_above_embedding(&self) -> bool {
        let mut blocks = self.model.part_blocks[0].iter();
        blocks.all(|id| self.model.blocks[id.0 as usize].trained().is_empty())
    }

    /// Floats of workspace that one visit needs. Its views overlap nothing. `hands_on`: it writes
    /// the gradient of what it read.
    fn visit(&self, batch: BatchView<'_>, layer: usize, phase: Phase, hands_on: bool) -> usize {
        let backward = phase.is_backward();
        let Measure { kernels, dtype, model, save } = *self;
        let (sequences, positions) = (batch.sequences(), batch.longest());
        let (saved, chunk_state, is_tile) = match &model.parts[layer] {
            Part::Embedding => return 0,
            Part::Stack(layer) => {
                let saved = save.map_or(0, |save| layer.saved_len(positions, save, dtype));
                (saved * sequences, layer.chunk_state_len(positions, backward, dtype), false)
            }
            Part::Head(_) | Part::Classes(_) => (0, 0, true),
        };
        let tensors = &model.blocks[model.part_blocks[layer][0].0 as usize];
        let (published, trained) = (tensors.published_len(dtype), tensors.trained_len());
        let hidden = batch.rows() * model.shape.hidden;
        let statistics = batch.rows() * STATISTICS;
        let mut at = 0;
        let mut place = |len: usize| {
            at += len;
            View::floats(at - len, len)
        };
        let (weights, gradient) = (place(published), place(trained));
        let (x, y, dy) = (place(hidden), place(hidden), place(hidden));
        // An evaluation saves nothing, whatever training saves.
        let saved = (backward && saved > 0).then(|| place(saved));
        let statistics = [place(statistics), place(statistics)];
        let dy_role =
            if is_tile || self.is_last(layer) { Role::HeadGradient } else { Role::HiddenGradient };
        let hidden = (Role::Hidden, x);
        let saved = saved.map(|saved| (Role::SavedActivations, saved));
        let [known, updated] = statistics.map(|statistics| (Role::Statistics, statistics));
        let (reads, writes) = match (is_tile, backward) {
            (false, false) => (vec![hidden], vec![(Role::Hidden, y)]),
            (false, true) => {
                let is_read = phase != Phase::Weights && hands_on;
                let dx = is_read.then_some((Role::HiddenGradient, y));
                (vec![hidden, (dy_role, dy)], dx.into_iter().collect())
            }
            (true, false) => (vec![hidden, known], vec![updated]),
            (true, true) => {
                let last = layer + 1 == model.parts.len();
                let down = hands_on.then_some((dy_role, y));
                let writes = down.into_iter().chain(last.then_some(updated));
                (vec![hidden, known, (dy_role, dy)], writes.collect())
            }
        };
        let reads = reads.into_iter().chain(saved).collect();
        let args = VisitArgs {
            batch,
            labelled: batch.rows(),
            dtype,
            weights,
            gradient: (phase.adds_gradients() && trained > 0).then_some(gradient),
            accumulate: false,
            reads,
            writes: writes.into_iter().collect(),
            scale: 1.0,
            save: save.unwrap_or(Save::All),
            chunk_state: place(chunk_state),
            workspace: place(usize::MAX / 4),
        };
        VisitRun::new(model, layer, kernels, &args).run(backward)
    }
}
