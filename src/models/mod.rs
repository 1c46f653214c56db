//! Models: what layers there are and what each does, without saying where.

mod gpt2;
mod kernels;
mod layer;
mod loss;
mod model;
mod shape;

pub use gpt2::{Block, Final, Stem};
pub use kernels::{
    Attention, Dropout, Gelu, Kernels, Linear, Norm, Rows, STATISTICS, Sampling, Scores, View,
};
pub use layer::{
    Backward, Draw, Forward, Init, Kind, Layer, Micro, Scratch, Tensor, block_len, tensor_ranges,
    tensor_views,
};
pub use loss::{CrossEntropy, Loss};
pub use model::{Model, Part, Tile};
pub use shape::{Dropouts, Shape};
