//! Models: their layers, the computation of each, and the tensors of blocks. Where a layer computes
//! is decided elsewhere.

pub(crate) mod adapters;
mod balance;
mod block;
mod block_inputs;
mod block_tensors;
mod classes;
mod composed;
mod dense;
mod ends;
pub mod families;
mod flops;
mod frozen;
mod layer;
mod lora;
mod low_rank;
mod masters;
mod model;
mod norms;
mod pooling;
mod portions;
mod ports;
mod projection;
mod room;
mod selection;
mod shape;
mod tables;
mod training;
mod visit;
mod walk;
mod windows;

pub use adapters::{AdaptedModule, Adapters};
pub use balance::{Balance, BalanceOf, BalanceOver};
pub(crate) use block::PASSED_ON;
pub use block::TransformerBlock;
pub use block_inputs::{BlockInputs, InputProjection};
pub(crate) use block_tensors::TensorFloats;
pub use block_tensors::{BlockTensors, SlotWeight};
pub use classes::{Classes, ClassesBackward, ClassesForward};
pub use composed::{Composed, Derived, Heads, Operations, Value};
pub(crate) use dense::{DENSE_FOLDERS, MOST_DENSE, is_of_dense};
pub use dense::{DenseLayer, DenseModule};
pub use ends::{Final, Stem};
pub use frozen::{Base, StoredWeight};
pub(crate) use frozen::{WeightFormat, WeightPiece};
pub use layer::{
    Backward, ChunkMemory, Cuts, Forward, Init, Keys, Kind, KvCache, Layer, Save, Tensor,
    block_len, tensor_ranges, tensor_views,
};
pub use lora::Lora;
pub use masters::MasterFormat;
pub use model::{Model, ModelLayer};
pub use pooling::EmbeddingPooling;
pub use portions::{LayerPortion, Part};
pub(crate) use ports::{FirstPorts, Port};
pub use ports::{LayerStep, PortViews, StepContext};
pub use projection::EmbeddingProjection;
pub use selection::LayerSelection;
pub use shape::{Dropouts, Experts, Head, IdleExperts, LinearAttention, NormPlaces, Shape};
pub(crate) use tables::TableTile;
pub use tables::Tile;
pub use training::Training;
pub(crate) use training::matches_tensor;
pub(crate) use visit::{BlockViews, Measured, VisitArgs, run, workspace};
pub(crate) use walk::{Turn, Walk, chunk_state_len};
pub use windows::{BlockPattern, GlobalHeads, SharedKv, Window};
