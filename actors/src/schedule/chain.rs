//! The steps of the layers that a selection visits, one behind the other.

use super::model::{RingModel, RingStep, Selection};
use super::{LayerId, Refusal, VisitKind, portions};

/// A declared step of a selected layer.
#[derive(Clone, Copy)]
pub(super) struct Chained<'m> {
    pub(super) layer: LayerId,
    /// The index of the step among those of the layer.
    pub(super) index: u16,
    pub(super) step: &'m RingStep,
}

/// The steps of the selected layers, in forward order.
pub(super) fn chain_of<'m>(
    model: &'m RingModel,
    selection: &Selection,
) -> Result<Vec<Chained<'m>>, Refusal> {
    let mut chain = Vec::with_capacity(selection.layers.len());
    for &layer in &selection.layers {
        let unknown = || Refusal::of(format!("{layer} is not in the model"));
        let steps = &model.layers.get(layer.0 as usize).ok_or_else(unknown)?.steps;
        chain.extend((0..).zip(steps).map(|(index, step)| Chained { layer, index, step }));
    }
    let is_gather = |chained: &Chained<'_>| chained.step.kind == VisitKind::Gather;
    if let Some(gather) = chain.iter().skip(1).find(|chained| is_gather(chained)) {
        let layer = gather.layer;
        return Err(Refusal::of(format!("{layer} gathers, and stands behind another step")));
    }
    if chain.iter().all(is_gather) {
        return Err(Refusal::of("no layer of the selection is visited by a device"));
    }
    for Chained { layer, step, .. } in &chain {
        let names = portions::names(&model.cuts, step.portions());
        names.map_err(|reason| Refusal::of(format!("{layer} {reason}")))?;
    }
    let mut needs = chain.iter().flat_map(|chained| &chained.step.needs);
    match needs.find(|id| id.0 as usize >= model.blocks.len()) {
        Some(id) => Err(Refusal::of(format!("{id} of a layer is not in the model"))),
        None => Ok(chain),
    }
}
