//! Models: what layers there are and what each does, without saying where.

mod block;
mod classes;
mod composed;
mod ends;
pub mod families;
mod kernels;
mod layer;
mod loss;
mod model;
mod own;
mod rotary;
mod shape;
mod view;

pub use block::Block;
pub use classes::Classes;
pub use composed::{Composed, Derived, Heads, Operations, Value};
pub use ends::{Final, Stem};
pub use kernels::{
    Activation, Apart, Attention, ClassLoss, Document, Dropout, Kernels, Linear, Norm, Places,
    Rows, STATISTICS, Scores,
};
pub use layer::{
    Backward, Draw, Forward, Init, Keep, Kind, Layer, Memory, Micro, STRETCH, Scratch, Stretch,
    Tensor, block_len, tensor_ranges, tensor_views,
};
pub use loss::{CrossEntropy, Loss};
pub use model::{Model, Part, Tile};
pub use own::{OnCpu, Own};
pub use rotary::{Rotary, RotaryScaling};
pub use shape::{Dropouts, Head, Shape};
pub use view::{Dtype, View};
