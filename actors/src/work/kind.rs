//! Kinds of work, as timelines show them.

use crate::schedule::Phase;

/// Kinds of work as timelines show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkKind {
    /// A block goes to the device.
    Weights,
    /// Shards of a block come from other devices.
    Shards,
    /// A boundary goes to the device.
    Input,
    /// A micro-batch's forward pass through a layer.
    Forward,
    /// What later chunks of a sequence attend to is computed again, before a backward pass.
    Keys,
    /// A micro-batch's backward pass through a layer.
    Backward,
    /// A boundary leaves the device.
    Output,
    /// A gradient leaves the device.
    Gradient,
    /// Embeddings are looked up.
    Gather,
    /// What layers or an objective measured is taken, or answered.
    Balance,
    /// A loss is computed.
    Loss,
    /// Gradients are added; or one is measured, and copied where it must wait.
    Reduce,
    /// The embedding's gradient is added up.
    Scatter,
    /// A block is updated.
    Update,
    /// Blocks that are not updated get the next version.
    Carry,
    /// A staged block is read from its file.
    Read,
    /// A staged block is written to its file.
    Write,
    /// The files of a step are made the state to resume from.
    Seal,
    /// A block is completed of the parts that other processes have.
    Fetch,
    /// A gradient goes to the processes that update its parts, and theirs comes; rows of the
    /// embedding's gradient, likewise.
    Exchange,
    /// Losses, sums of squares or measures of all processes are added.
    Sum,
}

impl WorkKind {
    /// The name of the kind in timelines.
    pub fn name(self) -> &'static str {
        match self {
            WorkKind::Weights => "weights",
            WorkKind::Shards => "shards",
            WorkKind::Input => "input",
            WorkKind::Forward => "forward",
            WorkKind::Keys => "keys",
            WorkKind::Backward => "backward",
            WorkKind::Output => "output",
            WorkKind::Gradient => "gradient",
            WorkKind::Gather => "gather",
            WorkKind::Balance => "balance",
            WorkKind::Loss => "loss",
            WorkKind::Reduce => "reduce",
            WorkKind::Scatter => "scatter",
            WorkKind::Update => "update",
            WorkKind::Carry => "carry",
            WorkKind::Read => "read",
            WorkKind::Write => "write",
            WorkKind::Seal => "seal",
            WorkKind::Fetch => "fetch",
            WorkKind::Exchange => "exchange",
            WorkKind::Sum => "sum",
        }
    }
}

impl From<Phase> for WorkKind {
    fn from(phase: Phase) -> WorkKind {
        match phase {
            Phase::Forward | Phase::Reference => WorkKind::Forward,
            Phase::Keys => WorkKind::Keys,
            Phase::Backward => WorkKind::Backward,
        }
    }
}
