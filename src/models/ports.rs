//! The steps that a layer declares: the blocks that each needs, and the boundaries that it reads,
//! writes and saves. Schedule, plan, memory and lanes follow from the declaration, so a layer of
//! another shape changes none of them.

use std::ops::Range;

use l2l_actors::schedule::{Boundary, Input, Question, Role};

use super::layer::{Cuts, Save};
use super::shape::{Head, Shape};
use crate::kernels::{BatchMetadata, BatchView, STATISTICS};
use crate::tensor::{Dtype, View};

/// One visit of a layer in the forward pass. The backward pass visits the layer's steps in reverse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerStep {
    /// The blocks that the step needs, as indices among the [blocks](super::Layer::blocks) of the
    /// layer. Only one step may need a block that is trained.
    pub blocks: Vec<usize>,
    /// The portion that the step needs of its blocks, by its index among their
    /// [portions](super::Layer::portions); `None`: it needs all of them.
    pub cut: Option<u16>,
    /// The role of the boundary by which rows choose [parts](super::Layer::parts_of_block) of the
    /// blocks. An earlier step of the layer writes it. Parts that no row of a visit chose may hold
    /// anything. `None`: each row uses all of the blocks.
    pub chosen_by: Option<Role>,
    /// The boundaries that the step reads. The first is `x` of [`Forward`](super::Forward). The
    /// backward reads it again, so it cannot be [`once`](Input::once).
    pub reads: Vec<Input>,
    /// The boundaries that the step writes. The first is `y` of [`Forward`](super::Forward).
    pub writes: Vec<Boundary>,
    /// Activations that the forward saves for the backward; `None`: they are recomputed.
    pub saves: Option<Boundary>,
    /// What the forward measures for the host in a training step, and the host's answer for the
    /// backward.
    pub asks: Option<Question>,
}

/// The roles of the first input and of the first output that a step declares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstPorts {
    pub(crate) read: Role,
    pub(crate) written: Role,
}

impl LayerStep {
    /// The roles of its first boundaries. A step without one has none to ask for.
    pub(crate) fn first_ports(&self) -> FirstPorts {
        FirstPorts {
            read: self.reads.first().map_or(Role::Hidden, |input| input.boundary.role),
            written: self.writes.first().map_or(Role::Hidden, |boundary| boundary.role),
        }
    }

    /// A step from hidden states to hidden states, which needs these blocks and saves nothing.
    pub fn on_hidden(context: &StepContext, blocks: Vec<usize>) -> LayerStep {
        let reads = vec![context.hidden_input()];
        let writes = vec![context.hidden()];
        LayerStep { blocks, cut: None, chosen_by: None, reads, writes, saves: None, asks: None }
    }
}

/// The step of the ring for which layers declare their steps.
#[derive(Clone, Copy, Debug)]
pub struct StepContext {
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// The dtype of weights and activations.
    pub dtype: Dtype,
    /// Which activations wait for the backward pass; `None`: all are recomputed.
    pub save: Option<Save>,
    /// C, the width of hidden states.
    pub channels: usize,
    /// The most positions of a chunk.
    pub(crate) chunk_positions: usize,
    /// Whether heads leave their logits for the host.
    pub(crate) scores: bool,
    /// With a KV cache: how many positions a sequence has there, or more.
    pub(crate) cached: Option<usize>,
    /// Hidden states, in the stash's encoding.
    pub(crate) hidden: Boundary,
    /// The same between the embedding and the first block, where they may have other channels.
    pub(crate) embedding: Boundary,
}

impl StepContext {
    /// The context of a training step on sequences of up to `positions` tokens.
    pub(crate) fn new(
        shape: &Shape,
        positions: usize,
        dtype: Dtype,
        save: Option<Save>,
    ) -> StepContext {
        let Shape { hidden: channels, chunk_positions, .. } = *shape;
        let of_width = |width| Boundary::of_tokens(Role::Hidden, width, dtype.size());
        let hidden = of_width(channels);
        let embedding = of_width(shape.gathered_width());
        let scores = false;
        let cached = None;
        StepContext {
            positions,
            dtype,
            save,
            channels,
            chunk_positions,
            scores,
            cached,
            hidden,
            embedding,
        }
    }

    /// The positions of each chunk of the longest sequence.
    pub(crate) fn chunks(&self, cuts: Cuts) -> impl Iterator<Item = usize> + use<> {
        let positions = self.positions;
        let most = if cuts == Cuts::Never { positions } else { self.chunk_positions };
        (0..positions).step_by(most.max(1)).map(move |from| most.min(positions - from))
    }

    /// Hidden states, (R, C), of the device's dtype.
    pub fn hidden(&self) -> Boundary {
        self.hidden
    }

    /// Hidden states as a layer of the stack reads them: its backward writes their gradient.
    pub fn hidden_input(&self) -> Input {
        let gradient = Boundary { role: Role::HiddenGradient, ..self.hidden };
        Input::new(self.hidden, Some(gradient))
    }

    /// The embedding's output as the layers before the first block read it.
    pub(crate) fn embedding_input(&self) -> Input {
        let gradient = Boundary { role: Role::HiddenGradient, ..self.embedding };
        Input::new(self.embedding, Some(gradient))
    }

    /// A tensor of the layers' own, (R, `width`), of the device's dtype. The layers of this library
    /// use the numbers from 252 on.
    pub fn own(&self, number: u16, width: usize) -> Boundary {
        Boundary::of_tokens(Role::Own(number), width, self.dtype.size())
    }

    /// The tensor of [`own`](Self::own) as a layer reads it: its backward writes the gradient.
    pub fn own_input(&self, number: u16, width: usize) -> Input {
        let boundary = self.own(number, width);
        let gradient = Boundary { role: Role::OwnGradient(number), ..boundary };
        Input::new(boundary, Some(gradient))
    }

    /// Saved activations of `floats` for each sequence of up to [`positions`](Self::positions)
    /// tokens. `None` for 0.
    pub fn saved(&self, floats: usize) -> Option<Boundary> {
        let boundary = Boundary::of_sequences(Role::SavedActivations, floats, Dtype::F32.size());
        (floats > 0).then_some(boundary)
    }

    /// The labels, from which this head computes losses, and the numbers that its tiles pass on.
    /// (R, 4), floats; of sequences with L labels, which may be several, (B, 1 + L).
    pub(crate) fn statistics(&self, head: Head) -> Boundary {
        let size = Dtype::F32.size();
        match head.label_set() {
            None => Boundary::of_tokens(Role::Statistics, STATISTICS, size),
            Some(labels) => Boundary::of_sequences(Role::Statistics, 1 + labels, size),
        }
    }

    /// The hidden states as a head reads them. Their gradient has this dtype.
    pub(crate) fn head_input(&self, gradient: Dtype) -> Input {
        let gradient = Boundary::of_tokens(Role::HeadGradient, self.channels, gradient.size());
        Input::new(self.hidden, Some(gradient))
    }

    /// Adds keys and values of `width` numbers for each position, if this step has a KV cache.
    pub(crate) fn add_kv(&self, step: &mut LayerStep, width: usize) {
        let Some(cached) = self.cached.filter(|_| width > 0) else { return };
        let size = self.dtype.size();
        step.writes.push(Boundary::of_tokens(Role::NewKv, width, size));
        if cached > 0 {
            let boundary = Boundary::of_sequences(Role::CachedKv, cached * width, size);
            step.reads.push(Input::new(boundary, None));
        }
    }

    /// Adds `floats` that a sequence keeps in the KV cache, however long it is, if this step has
    /// one.
    pub(crate) fn add_state(&self, step: &mut LayerStep, floats: usize) {
        let Some(cached) = self.cached.filter(|_| floats > 0) else { return };
        let boundary = |role| Boundary::of_sequences(role, floats, Dtype::F32.size());
        step.writes.push(boundary(Role::NewKv));
        if cached > 0 {
            step.reads.push(Input::new(boundary(Role::CachedKv), None));
        }
    }
}

/// A boundary of a visit, and the floats in which a micro-batch of it lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub(crate) boundary: Boundary,
    pub(crate) view: View,
}

/// Floats for each chunk, of at most so many positions, that lie behind the rows of a boundary,
/// sequence by sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Behind {
    pub(crate) floats: usize,
    pub(crate) positions: usize,
}

/// The boundaries of a visit for one micro-batch, by their role.
#[derive(Clone, Copy, Debug)]
pub struct PortViews<'a> {
    pub(crate) reads: &'a [Port],
    pub(crate) writes: &'a [Port],
    /// The rows that the boundaries hold.
    pub(crate) held: BatchView<'a>,
    /// The rows that the layer sees: these, or a chunk of them.
    pub(crate) chunk: BatchView<'a>,
    pub(crate) dtype: Dtype,
}

impl PortViews<'_> {
    /// A visit without boundaries.
    pub(crate) const NONE: PortViews<'static> = {
        let held = BatchMetadata::plain(&[0]).view();
        PortViews { reads: &[], writes: &[], held, chunk: held, dtype: Dtype::F32 }
    };

    /// The boundary of this role that the visit reads: (R, its width), or (B, its width).
    pub fn read(&self, role: Role) -> Option<View> {
        self.find(self.reads, role)
    }

    /// The boundary of this role that the visit writes: (R, its width), or (B, its width).
    pub fn written(&self, role: Role) -> Option<View> {
        self.find(self.writes, role)
    }

    /// A sum that the visit reads: its rows, and the floats of the chunk behind the rows of all.
    pub(crate) fn read_sum(&self, role: Role, behind: Behind) -> Option<[View; 2]> {
        self.sum(self.reads, role, behind)
    }

    /// As [`read_sum`](Self::read_sum), of a sum that the visit writes.
    pub(crate) fn written_sum(&self, role: Role, behind: Behind) -> Option<[View; 2]> {
        self.sum(self.writes, role, behind)
    }

    fn sum(&self, ports: &[Port], role: Role, behind: Behind) -> Option<[View; 2]> {
        let Port { boundary, view } = ports.iter().find(|port| port.boundary.role == role)?;
        let width = boundary.width();
        let end = self.held.rows() * width;
        let of_sequence = boundary.sequence_bytes as usize / Dtype::F32.size();
        let sequence = self.chunk.first_sequence() - self.held.first_sequence();
        let position = self.chunk.first_position() - self.held.first_position();
        let from = end + sequence * of_sequence + position / behind.positions * behind.floats;
        let rows = view.part(0..end).with_columns(width).row_range(self.rows());
        Some([rows, view.part(from..from + behind.floats)])
    }

    fn find(&self, ports: &[Port], role: Role) -> Option<View> {
        ports.iter().find(|port| port.boundary.role == role).map(|port| self.view(port))
    }

    fn view(&self, &Port { boundary, view }: &Port) -> View {
        let Boundary { token_bytes, sequence_bytes, element_bytes, .. } = boundary;
        let is_float = usize::from(element_bytes) == Dtype::F32.size();
        let dtype = if is_float { Dtype::F32 } else { self.dtype };
        match (token_bytes, sequence_bytes) {
            (_, 0) => view.hold(self.held.rows(), boundary.width(), dtype).row_range(self.rows()),
            (0, bytes) => {
                let all = view.hold(self.held.sequences(), bytes as usize / dtype.size(), dtype);
                let first = self.chunk.first_sequence() - self.held.first_sequence();
                all.row_range(first..first + self.chunk.sequences())
            }
            _ => view,
        }
    }

    /// The saved activations. Unless each token has its own, those of a chunk lie at a `place`
    /// among all; `None`: all are those of the chunk.
    pub(crate) fn saved(&self, place: impl FnOnce() -> Option<Range<usize>>) -> Option<View> {
        let mut ports = self.writes.iter().chain(self.reads);
        let port = ports.find(|port| port.boundary.role == Role::SavedActivations)?;
        let place = if port.boundary.sequence_bytes > 0 { place() } else { None };
        Some(place.map_or_else(|| self.view(port), |place| port.view.part(place)))
    }

    /// The rows that the layer sees, among those that the boundaries hold.
    pub(crate) fn rows(&self) -> Range<usize> {
        let first = self.held.row_range().start;
        let Range { start, end } = self.chunk.row_range();
        start - first..end - first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::SequenceChunk;

    /// A layer sees the same rows of a chunk, whether boundaries hold all rows or these alone.
    #[test]
    fn a_chunk_has_its_rows_and_its_sequence() {
        let all = BatchMetadata::plain(&[5, 9, 15]).view();
        let chunk = all.chunk_of(SequenceChunk { sequence: 1, from: 2, to: 5 });
        let float = Dtype::F32.size();
        let ports = [
            Port { boundary: Boundary::of_tokens(Role::Hidden, 4, 2), view: View::floats(100, 20) },
            Port {
                boundary: Boundary::of_sequences(Role::Routing, 3, float),
                view: View::floats(200, 6),
            },
        ];
        let seen = |held, chunk, role| {
            let ports = PortViews { reads: &ports, writes: &[], held, chunk, dtype: Dtype::Bf16 };
            let View { at, rows, columns, .. } = ports.read(role).expect("it is there");
            [at, rows, columns]
        };
        assert_eq!(seen(all, all, Role::Hidden), [200, 10, 4]);
        assert_eq!(seen(all, chunk, Role::Hidden), [200 + 6 * 4, 3, 4]);
        assert_eq!(seen(chunk, chunk, Role::Hidden), [200, 3, 4]);
        assert_eq!(seen(all, all, Role::Routing), [200, 2, 3]);
        assert_eq!(seen(all, chunk, Role::Routing), [203, 1, 3]);
        assert_eq!(seen(chunk, chunk, Role::Routing), [200, 1, 3]);
    }
}
