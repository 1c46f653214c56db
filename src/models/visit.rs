//! One micro-batch at one visit: which views are what to the layer that is visited.

use l2l_actors::schedule::{Phase, Visit};

use crate::kernels::{BatchView, CHUNK_POSITIONS, DropoutKey, Kernels, Rows, STATISTICS};
use crate::models::{Backward, Forward, KvCache, Model, Part, Save, Tile, block_len};
use crate::tensor::{Dtype, Scratch, View};

/// What a micro-batch brings to a visit, and where it leaves what.
pub(crate) struct VisitArgs<'a> {
    pub(crate) batch: BatchView<'a>,
    /// Its positions that have a label.
    pub(crate) labelled: usize,
    /// What weights and activations are.
    pub(crate) dtype: Dtype,
    pub(crate) weights: View,
    pub(crate) gradient: Option<View>,
    pub(crate) accumulate: bool,
    /// Slots of boundaries, in floats whatever they hold.
    pub(crate) reads: Vec<View>,
    pub(crate) writes: Vec<View>,
    pub(crate) scale: f32,
    /// True when heads tell logits, or scores, in front of their statistics.
    pub(crate) tells: bool,
    /// What is kept in the stash, if anything is.
    pub(crate) save: Save,
    /// True when layers tell what they remember behind their output.
    pub(crate) remembers: bool,
    pub(crate) workspace: View,
    /// What chunks of a long sequence leave to each other.
    pub(crate) chunk_state: View,
}

/// Runs it; floats of workspace that were in use at once, at most.
pub(crate) fn run(
    model: &Model,
    visit: &Visit,
    kernels: &dyn Kernels,
    stay: &VisitArgs<'_>,
) -> usize {
    go(model, visit.layer.0 as usize, visit.phase == Phase::Backward, kernels, stay)
}

fn go(
    model: &Model,
    layer: usize,
    backward: bool,
    kernels: &dyn Kernels,
    stay: &VisitArgs<'_>,
) -> usize {
    let VisitArgs {
        batch,
        labelled,
        dtype,
        weights,
        gradient,
        accumulate,
        ref reads,
        ref writes,
        ..
    } = *stay;
    let VisitArgs { scale, tells, save, remembers, workspace, chunk_state, .. } = *stay;
    let scratch = &Scratch::new(workspace, dtype);
    let hidden = |slot: View, of: Dtype| slot.hold(batch.rows.count() * model.shape.hidden, of);
    let head_gradient = model.head_gradient(dtype);
    match (&model.parts[layer], backward) {
        (Part::Embedding, _) => unreachable!("the embedding is visited on the host"),
        (Part::Stack(layer), false) => {
            let (x, y) = (hidden(reads[0], dtype), hidden(writes[0], dtype));
            let kv_width = |slot: &View| {
                let (floats, width) = (Dtype::F32.size() * slot.len(), layer.kv_width());
                slot.hold(floats / dtype.size() / width * width, dtype)
            };
            let (saved, memory) = match writes.get(1).copied() {
                Some(fresh) if remembers => {
                    let (fresh, past) = (kv_width(&fresh), reads.get(1).map(kv_width));
                    (None, Some(KvCache { fresh, past }))
                }
                saved => (saved.map(|view| (save, view)), None),
            };
            let pass = Forward { batch, weights, x, y, saved, memory, chunk_state, scratch };
            layer.forward(kernels, &pass);
        }
        (Part::Stack(of), true) => {
            let x = hidden(reads[0], dtype);
            let saved = (reads.len() == 3).then(|| (save, reads[1]));
            let dx = writes.first().map(|slot| hidden(*slot, dtype));
            let is_last = model.parts.get(layer + 1).is_some_and(Part::is_head);
            let given = if is_last { head_gradient } else { dtype };
            let mut dy = hidden(reads[reads.len() - 1], given);
            if given != dtype && !of.takes_floats() {
                let cast = scratch.take(dy.len());
                kernels.cast(cast, dy);
                dy = cast;
            }
            let pass = Backward {
                batch,
                weights,
                gradient,
                accumulate,
                x,
                saved,
                dy,
                dx,
                chunk_state,
                scratch,
            };
            of.backward(kernels, &pass);
        }
        (Part::Classes(classes), false) => {
            let told = tells.then_some(writes[0]);
            let views = [writes[writes.len() - 1], reads[1], hidden(reads[0], dtype)];
            classes.forward(kernels, &batch, weights, views, told, scratch);
        }
        (Part::Classes(classes), true) => {
            let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len()));
            let views = [hidden(writes[0], head_gradient), reads[1], hidden(reads[0], dtype)];
            classes.backward(kernels, &batch, weights, gradient, views, scale, accumulate, scratch);
        }
        (&Part::Head(tile), false) => {
            let (w, bias) = head_views(model, tile, weights);
            let size = model.scores(tile, batch.rows.count(), labelled);
            let (out, statistics) = (writes[writes.len() - 1], reads[1]);
            let h = hidden(reads[0], dtype);
            if tells {
                kernels.logits(writes[0], statistics, h, w, bias, size, scratch);
                kernels.cast(out, statistics);
            } else {
                kernels.score(out, statistics, h, w, bias, size, scratch);
            }
        }
        (&Part::Head(tile), true) => {
            let gradient = gradient.unwrap_or_else(|| scratch.take_floats(weights.len()));
            let (w, bias) = head_views(model, tile, weights);
            let (dw, dbias) = head_views(model, tile, gradient);
            let (h, statistics) = (hidden(reads[0], dtype), reads[1]);
            let before = reads.get(2).map(|slot| hidden(*slot, head_gradient));
            let size = model.scores(tile, batch.rows.count(), labelled);
            kernels.score_backward(
                hidden(writes[0], head_gradient),
                dw,
                dbias,
                before,
                statistics,
                h,
                w,
                bias,
                &*model.loss,
                scale,
                size,
                accumulate,
                scratch,
            );
        }
    }
    scratch.peak()
}

/// The table of a head's tile, and its bias by token.
fn head_views(model: &Model, tile: Tile, block: View) -> (View, Option<View>) {
    let table = tile.rows * model.shape.hidden;
    let bias = table.next_multiple_of(16);
    (block.part(0..table), model.shape.masked_head().then(|| block.part(bias..bias + tile.rows)))
}

/// Floats of workspace that one micro-batch of at most so many positions needs. All at once, those of
/// a chunk may need more than those of a sequence that is cut. `kernels` have no memory.
pub(crate) fn workspace(
    kernels: &dyn Kernels,
    dtype: Dtype,
    model: &Model,
    sequences: usize,
    positions: usize,
    save: Option<Save>,
    trains: bool,
) -> usize {
    let needs = [positions, positions.min(CHUNK_POSITIONS)].map(|positions| {
        workspace_of(kernels, dtype, model, Rows { sequences, positions }, save, trains)
    });
    needs[0].max(needs[1])
}

/// Found by walking every layer both ways on a device without memory.
fn workspace_of(
    kernels: &dyn Kernels,
    dtype: Dtype,
    model: &Model,
    rows: Rows,
    save: Option<Save>,
    trains: bool,
) -> usize {
    let Rows { sequences, positions } = rows;
    let lengths = vec![positions; sequences];
    let key = Some(DropoutKey { seed: 0, step: 0, first_sequence: 0, first_position: 0 });
    let kinds = vec![0; rows.count()];
    let (documents, past) = (&[], &[]);
    let batch = BatchView { rows, lengths: &lengths, kinds: &kinds, documents, past, key };
    let hidden = rows.count() * model.shape.hidden;
    let mut most = 0;
    for (layer, (part, blocks)) in model.parts.iter().zip(&model.part_blocks).enumerate() {
        let (saved, is_tile) = match part {
            Part::Embedding => continue,
            Part::Stack(layer) => {
                let saved = save.map_or(0, |save| layer.saved_len(positions, save, dtype));
                (saved * sequences, false)
            }
            Part::Head(_) | Part::Classes(_) => (0, true),
        };
        let block = block_len(&model.blocks[blocks[0].0 as usize]);
        for &backward in if trains { &[false, true][..] } else { &[false] } {
            // Views that overlap nothing.
            let mut at = 0;
            let mut place = |len: usize| {
                at += len;
                View::floats(at - len, len)
            };
            let (weights, gradient) = (place(block).hold(block, dtype), place(block));
            let (x, y, dy) = (place(hidden), place(hidden), place(hidden));
            // Who only looks keeps nothing, whatever training keeps.
            let saved = (backward && saved > 0).then(|| place(saved));
            let statistics = [place(rows.count() * STATISTICS), place(rows.count() * STATISTICS)];
            let (reads, writes) = match (is_tile, backward) {
                (false, false) => (vec![x], [y].into_iter().chain(saved).collect()),
                (false, true) => ([x].into_iter().chain(saved).chain([dy]).collect(), vec![y]),
                (true, false) => (vec![x, statistics[0]], vec![statistics[1]]),
                (true, true) => (vec![x, statistics[0], dy], vec![y]),
            };
            let chunk_state = match part {
                Part::Stack(layer) => place(layer.chunk_state_len(positions, backward, dtype)),
                _ => place(0),
            };
            let workspace = place(usize::MAX / 4);
            let stay = VisitArgs {
                batch,
                labelled: rows.count(),
                dtype,
                weights,
                gradient: backward.then_some(gradient),
                accumulate: false,
                reads,
                writes,
                scale: 1.0,
                tells: false,
                save: save.unwrap_or(Save::All),
                remembers: false,
                workspace,
                chunk_state,
            };
            most = most.max(go(model, layer, backward, kernels, &stay));
        }
    }
    most
}
