//! What a config names: the shape of its model, what of the model is trained, and the weights that
//! it begins with. A config names a preset or a directory in transformers' format.

mod head;
mod head_counts;
mod model;
mod sentence;
mod shape;
mod weights;

pub(crate) use model::{freeze_own, label_names, set_objective};
pub use model::{model_of, training_of};
pub(crate) use sentence::{directories_of, prompts_of};
pub use shape::{largest_shape_of, shape_of};
pub(crate) use weights::{check_missing, load_first};
