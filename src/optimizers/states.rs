//! The states that an update rule keeps of each tensor, and their places in memory.
//!
//! A rule declares its states by name, dtype and sizes. The plan, the EPS, its file, checkpoints
//! and digests follow from the declaration. A tensor that some updates leave alone has one more
//! state: the count of its updates.

use std::ops::Range;

use super::UpdateRule;
use crate::models::{BlockTensors, Tensor};

/// The type of a state's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDtype {
    /// 32-bit floats.
    F32,
    /// 16-bit brain floats.
    Bf16,
    /// Bytes.
    U8,
}

impl StateDtype {
    /// The bytes of an element.
    pub fn size(self) -> usize {
        match self {
            StateDtype::F32 => 4,
            StateDtype::Bf16 => 2,
            StateDtype::U8 => 1,
        }
    }
}

/// One state of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleState {
    /// The name of the state in a checkpoint, behind the tensor's.
    pub name: &'static str,
    /// The type of its elements. In memory they begin a slice of floats, in the machine's byte
    /// order.
    pub dtype: StateDtype,
    /// The sizes of the state, outermost first. The states of a tensor that is cut into tiles are
    /// joined along the first size.
    pub shape: Vec<usize>,
}

impl RuleState {
    /// A state of floats, as many as the tensor has elements.
    pub fn like(name: &'static str, tensor: &Tensor) -> RuleState {
        RuleState { name, dtype: StateDtype::F32, shape: tensor.shape.clone() }
    }

    /// The bytes of the state.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// The floats that it takes.
    pub fn floats(&self) -> usize {
        self.bytes().div_ceil(size_of::<f32>())
    }
}

/// The states of a tensor: those of its rule, and behind them the number of its updates if it does
/// not have all updates of its block.
fn states_of(rule: &dyn UpdateRule, tensor: &Tensor) -> Vec<RuleState> {
    const UPDATES: &str = "updates";
    let mut states = rule.state_layout(tensor);
    if tensor.kept_with.is_some() {
        let is_free = states.iter().all(|state| state.name != UPDATES);
        assert!(is_free, "a rule has a state of the name {UPDATES:?}, which means a count here");
        states.push(RuleState { name: UPDATES, dtype: StateDtype::U8, shape: vec![8] });
    }
    states
}

/// Adds an update to a count, unless the update leaves the tensor alone. Returns the count before.
pub(super) fn count_update(count: &mut [f32], is_left: bool) -> u64 {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(count);
    let before = u64::from_ne_bytes((&*bytes).try_into().expect("eight bytes"));
    bytes.copy_from_slice(&(before + u64::from(!is_left)).to_ne_bytes());
    before
}

/// States begin at a multiple of this number of floats, as tensors do.
const ALIGNED: usize = 16;

/// The states of one block: state `i` of all its tensors, one behind the other, is one run of
/// floats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockStates {
    /// For each tensor that is trained: its states, each with its range in the run.
    tensors: Vec<Vec<(RuleState, Range<usize>)>>,
    /// The floats of each run.
    lens: Vec<usize>,
}

impl BlockStates {
    /// The states of these tensors under a rule.
    pub(crate) fn new(rule: &dyn UpdateRule, tensors: &[Tensor]) -> BlockStates {
        let mut lens: Vec<usize> = Vec::new();
        let mut of_tensor = |tensor: &Tensor| {
            let states = states_of(rule, tensor);
            lens.resize(lens.len().max(states.len()), 0);
            let place = |(len, state): (&mut usize, RuleState)| {
                let range = *len..*len + state.floats();
                *len = range.end.next_multiple_of(ALIGNED);
                (state, range)
            };
            lens.iter_mut().zip(states).map(place).collect()
        };
        let tensors = tensors.iter().map(&mut of_tensor).collect();
        BlockStates { tensors, lens }
    }

    pub(crate) fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// The floats of a run; of a state that no tensor of the block has, 0.
    pub(crate) fn len(&self, state: usize) -> usize {
        self.lens.get(state).copied().unwrap_or(0)
    }

    /// The states of a tensor, by its place among those that are trained, and the range of each in
    /// its run.
    pub(crate) fn of_tensor(&self, at: usize) -> &[(RuleState, Range<usize>)] {
        &self.tensors[at]
    }
}

/// The states of all blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateLayout(Vec<BlockStates>);

impl StateLayout {
    /// The states that a rule keeps of these blocks.
    pub(crate) fn new(rule: &dyn UpdateRule, blocks: &[BlockTensors]) -> StateLayout {
        let of_block = |block: &BlockTensors| BlockStates::new(rule, block.trained());
        StateLayout(blocks.iter().map(of_block).collect())
    }

    /// The states of a block. A layout of a model that is not trained has none.
    pub(crate) fn of(&self, block: usize) -> &BlockStates {
        static NONE: BlockStates = BlockStates { tensors: Vec::new(), lens: Vec::new() };
        self.0.get(block).unwrap_or(&NONE)
    }

    /// The number of states of the tensor that has most.
    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(|block| block.lens.len()).max().unwrap_or(0)
    }
}
