//! Experts that are visited apart: one step of the layer for the base block, and one for each few
//! bundles behind it. So a device holds these few, however many experts the layer has.
//!
//! The steps run what [`experts`](super::experts) runs in one visit, in the same order, so their
//! results have the same bits.

use std::ops::Range;

use l2l_actors::schedule::{Boundary, Input, Role};

use super::carried::Turn;
use super::chunk::KvViews;
use super::experts::{Closed, ExpertGradients, ExpertPass, Opened, PassedDown};
use super::routing::RoutingViews;
use super::shared::OwnViews;
use super::tensors::FeedForward;
use super::{ChunkInputs, TransformerBlock};
use crate::kernels::{Cast, Clear, Kernels};
use crate::models::layer::{Backward, Forward, block_len};
use crate::models::ports::{LayerStep, StepContext};
use crate::tensor::{Dtype, View};

/// The numbers of the boundaries between the steps. They are the last ones, so that layers of an
/// application do not use them by chance.
const INPUT: u16 = 252;
const CHOSEN: u16 = 253;
const SUM: u16 = 254;
const ATTENTION_SUM: u16 = 255;

/// What the steps pass on, for the search of numbers that are not finite. The hidden states behind
/// the layer do not say which step computed the first one.
pub(crate) const PASSED_ON: [(Role, &str); 3] = [
    (Role::Own(INPUT), "inputs of its experts"),
    (Role::Own(SUM), "sums of its experts' outputs"),
    (Role::OwnGradient(INPUT), "gradients of its experts' inputs"),
];

/// One visit's experts.
pub(super) struct Part {
    /// The indices of its blocks in the layer.
    blocks: Range<usize>,
    experts: Range<usize>,
    /// True for the part that ends the layer.
    is_last: bool,
}

impl TransformerBlock {
    /// The experts of a bundle, which is about as large as the first block, so that slots of one
    /// size waste little. The number follows from the shape alone.
    fn bundle_size(&self) -> usize {
        *self.bundle_size.get_or_init(|| {
            let Some(experts) = self.experts() else { return 1 };
            let plain = TransformerBlock::new(self.index, self.number, self.shape);
            let base = block_len(&plain.base_tensors());
            let expert = block_len(&plain.expert_tensors(experts, 0));
            ((base as f64 / expert as f64).round() as usize).clamp(1, experts.count)
        })
    }

    /// The experts of the `nth` block behind the first.
    pub(super) fn bundle(&self, nth: usize) -> Range<usize> {
        let size = self.bundle_size();
        let count = self.experts().map_or(0, |experts| experts.count);
        let first = nth * size;
        first.min(count)..count.min(first + size)
    }

    /// The number of blocks behind the first.
    pub(super) fn count_bundles(&self) -> usize {
        let count = self.experts().map_or(0, |experts| experts.count);
        count.div_ceil(self.bundle_size())
    }

    /// The parts behind the base block; none if all experts are visited together with it.
    fn parts(&self) -> impl Iterator<Item = Part> {
        (1..).map_while(|step| self.part(step))
    }

    /// The experts' part that a step visits; `None`: the step has the base block.
    fn part(&self, step: usize) -> Option<Part> {
        let most = self.experts()?.bundles?;
        let last = self.count_bundles();
        let first = step.checked_sub(1)?.saturating_mul(most);
        let end = last.min(first.saturating_add(most));
        (first < end).then(|| {
            let experts = self.bundle(first).start..self.bundle(end - 1).end;
            Part { blocks: 1 + first..1 + end, experts, is_last: end == last }
        })
    }

    /// True if the experts have visits of their own.
    pub(super) fn is_apart(&self) -> bool {
        self.experts().is_some_and(|experts| experts.bundles.is_some())
    }

    /// The experts whose weights a step has.
    pub(super) fn experts_of(&self, step: usize) -> Range<usize> {
        let all = self.experts().map_or(0, |experts| experts.count);
        match self.part(step) {
            Some(part) => part.experts,
            None if self.is_apart() => 0..0,
            None => 0..all,
        }
    }

    /// The steps behind that of the base block, `first`, which leaves the experts to them.
    pub(super) fn steps_apart(&self, context: &StepContext, first: LayerStep) -> Vec<LayerStep> {
        let choices = self.experts().map_or(0, |experts| experts.per_token);
        let floats = |role, width| Boundary::of_tokens(role, width, Dtype::F32.size());
        let own = |number| context.own(number, context.channels);
        let input = own(INPUT);
        let chosen = floats(Role::Own(CHOSEN), 2 * choices);
        let sum = floats(Role::Own(SUM), context.channels);
        let attention_sum = own(ATTENTION_SUM);
        let gradient = |number| Boundary { role: Role::OwnGradient(number), ..own(number) };
        let once =
            |boundary, number| Input { once: true, ..Input::new(boundary, Some(gradient(number))) };
        let dinput = floats(Role::OwnGradient(INPUT), context.channels);
        let dchosen = floats(Role::OwnGradient(CHOSEN), choices);
        let inputs =
            [Input::new(input, Some(dinput)), Input::new(chosen, Some(dchosen)), once(sum, SUM)];
        let mut writes = vec![attention_sum, input, chosen, sum];
        // Keys and values for the cache.
        writes.extend(first.writes.iter().filter(|written| written.role != Role::Hidden));
        let mut steps = vec![LayerStep { blocks: vec![0], writes, ..first }];
        for Part { blocks, is_last, .. } in self.parts() {
            let mut reads = inputs.to_vec();
            let mut writes = vec![sum];
            if is_last {
                reads.push(once(attention_sum, ATTENTION_SUM));
                writes = vec![context.hidden()];
            }
            steps.push(LayerStep {
                blocks: blocks.collect(),
                cut: None,
                chosen_by: Some(Role::Own(CHOSEN)),
                reads,
                writes,
                saves: None,
                asks: None,
            });
        }
        steps
    }

    /// Attention, the router and the shared expert, for the steps behind.
    pub(super) fn base_forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, x, saved, kv_cache, chunk_state, scratch, ports, .. } = *pass;
        let weights = &self.sorted(pass.weights, pass.stored);
        let FeedForward::Experts(experts) = &weights.feed_forward else {
            unreachable!("the block has experts")
        };
        let state = self.chunk_state(&batch, chunk_state, scratch.dtype());
        let kv = KvViews::new(kv_cache, state.map(|state| state.move_on(k)), None);
        let carried = self.carried(&batch, chunk_state, kv_cache, Turn::Forward);
        let routing = RoutingViews::of_forward(&ports);
        let own = OwnViews::default();
        let inputs = ChunkInputs { weights, chunk: batch, x, saved, kv, carried, routing, own };
        let pass = self.chunk_pass(k, &inputs, scratch);
        pass.recompute_feed_forward_input(scratch);
        let Opened { sum, chosen } = pass.open_experts(experts, scratch);
        let attention_sum = pass.saved.attention_sum;
        let left =
            [(ATTENTION_SUM, attention_sum), (INPUT, pass.hidden), (CHOSEN, chosen), (SUM, sum)];
        for (number, x) in left {
            let y = ports.written(Role::Own(number)).expect("the step declares it");
            k.cast(&Cast { y, x });
        }
    }

    /// Adds the outputs of a part's experts to their sum; the last part ends the layer.
    pub(super) fn part_forward(&self, k: &dyn Kernels, pass: &Forward<'_>) {
        let Forward { batch, y, ports, step, scratch, .. } = *pass;
        let Part { experts, is_last, .. } = self.part(step).expect("the layer has this step");
        let w = self.sorted_experts(pass.stored, experts.clone());
        let read = |number| ports.read(Role::Own(number)).expect("the step declares it");
        let [x, chosen, before] = [INPUT, CHOSEN, SUM].map(read);
        let sum = if is_last { scratch.take_floats(x.rows, x.columns) } else { y };
        k.cast(&Cast { y: sum, x: before });
        let products = self.products_on(k, batch, scratch);
        let pass = ExpertPass::new(&products, [x, chosen], None, scratch);
        pass.forward(experts.start, &w, sum, scratch);
        if is_last {
            let attention_sum = read(ATTENTION_SUM);
            let buffer = scratch.take_like(x);
            self.close_experts(k, &batch, &Closed { y, attention_sum, sum, buffer });
        }
    }

    /// The gradients of a part's experts, and what they pass down.
    pub(super) fn part_backward(&self, k: &dyn Kernels, pass: &Backward<'_>) {
        let Backward { batch, dy: dsum, ports, step, scratch, accumulate, .. } = *pass;
        let Part { experts, is_last, .. } = self.part(step).expect("the layer has this step");
        let w = &self.sorted_experts(pass.stored, experts.clone());
        let d = &self.sorted_experts(pass.gradients, experts.clone());
        let read = |number| ports.read(Role::Own(number)).expect("the step declares it");
        let [x, chosen] = [INPUT, CHOSEN].map(read);
        let products = self.products_on(k, batch, scratch);
        let mut dropped = dsum;
        if is_last {
            let dropout = self.feed_forward_dropout(&batch);
            dropped = products.dropout_backward(scratch.take_like(dsum), dsum, dropout);
        }
        // The gradient that the step above has added to, if there is one, and the place for it.
        let passes = |number, scratch_place: View| {
            let role = Role::OwnGradient(number);
            let y = ports.written(role).unwrap_or(scratch_place);
            match ports.read(role).filter(|_| !is_last) {
                Some(x) => k.cast(&Cast { y, x }),
                None => k.clear(&Clear { y }),
            }
            y
        };
        let dh = passes(INPUT, scratch.take_floats(x.rows, x.columns));
        let dchosen = passes(CHOSEN, scratch.take_floats(x.rows, chosen.columns / 2));
        for (number, x) in [(SUM, dropped), (ATTENTION_SUM, dsum)] {
            if let Some(y) = ports.written(Role::OwnGradient(number)) {
                k.cast(&Cast { y, x });
            }
        }
        let passed = PassedDown { dy: dropped, dh, dchosen };
        let pass = ExpertPass::new(&products, [x, chosen], None, scratch);
        let first = experts.start;
        pass.backward(&ExpertGradients { first, w, d, accumulate, passed }, scratch);
    }

    /// What the parts have passed down to the base block. `dh` is a copy, to be added to.
    pub(super) fn passed_down(&self, k: &dyn Kernels, pass: &Backward<'_>, dh: View) -> PassedDown {
        let read = |number| {
            let role = Role::OwnGradient(number);
            pass.ports.read(role).expect("the steps above pass it down")
        };
        k.cast(&Cast { y: dh, x: read(INPUT) });
        PassedDown { dy: read(SUM), dh, dchosen: read(CHOSEN) }
    }
}
